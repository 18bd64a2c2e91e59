"""The command `python -m anemoi_gt.export`; see `anemoi_gt.app.export`."""

from anemoi_gt.app.export import main

if __name__ == "__main__":
    main()
