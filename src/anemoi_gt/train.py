"""The command `python -m anemoi_gt.train`, which is `anemoi-gt train`, for torchrun."""

import sys

from anemoi_gt.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
