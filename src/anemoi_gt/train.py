"""The command `python -m anemoi_gt.train`; see `anemoi_gt.app.train_command`."""

from anemoi_gt.app.train_command import main

if __name__ == "__main__":
    main()
