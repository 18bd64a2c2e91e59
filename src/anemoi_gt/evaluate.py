"""The command `python -m anemoi_gt.evaluate`, which is `anemoi-gt evaluate`."""

import sys

from anemoi_gt.__main__ import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
