"""The command `python -m anemoi_gt.export`, which is `anemoi-gt export`."""

import sys

from anemoi_gt.__main__ import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
