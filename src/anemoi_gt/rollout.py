"""The command `python -m anemoi_gt.rollout`; see `anemoi_gt.app.rollout`."""

from anemoi_gt.app.rollout import main

if __name__ == "__main__":
    main()
