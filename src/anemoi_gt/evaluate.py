"""The command `python -m anemoi_gt.evaluate`; see `anemoi_gt.app.evaluate_command`."""

from anemoi_gt.app.evaluate_command import main

if __name__ == "__main__":
    main()
