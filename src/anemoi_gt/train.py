"""The command `python -m anemoi_gt.train`; see `anemoi_gt.app.train`."""

from anemoi_gt.app.train import main

if __name__ == "__main__":
    main()
