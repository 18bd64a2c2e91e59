"""One rank of the checks of several modules, one after another: `python every_check.py FOLDER PORT MODULE [PORT MODULE ..]`.

Each module has a job of its own, at its port and in its part of the folder, as when it is started alone.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from distributed import ranks


def main(folder, *jobs):
    """Run the checks of each module as one rank."""
    for port, module in zip(jobs[::2], jobs[1::2], strict=True):
        os.environ["MASTER_PORT"] = port
        ranks.main(f"distributed.{module}", str(Path(folder) / module))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
