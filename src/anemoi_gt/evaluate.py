"""The command `python -m anemoi_gt.evaluate`; see `anemoi_gt.app.evaluate`."""

from anemoi_gt.app.evaluate import main

if __name__ == "__main__":
    main()
