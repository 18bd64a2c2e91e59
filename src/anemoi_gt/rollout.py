"""The command `python -m anemoi_gt.rollout`, which is `anemoi-gt rollout`."""

import sys

from anemoi_gt.__main__ import main

if __name__ == "__main__":
    main(["rollout", *sys.argv[1:]])
