"""The command `python -m anemoi_gt.rollout`; see `anemoi_gt.app.rollout_command`."""

from anemoi_gt.app.rollout_command import main

if __name__ == "__main__":
    main()
