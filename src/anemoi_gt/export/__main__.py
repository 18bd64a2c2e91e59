"""The command `python -m anemoi_gt.export`; see `anemoi_gt.app.export_command`."""

from anemoi_gt.app.export_command import main

if __name__ == "__main__":
    main()
