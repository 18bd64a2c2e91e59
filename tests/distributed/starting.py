"""One rank of a job that starts and ends some times in the same process, and counts the ranks that are there each time.

python starting.py FOLDER TIMES [dying]        dying: rank 1 ends before its first start, and the launcher starts all anew
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from anemoi_gt.distributed import ShardingConfig, started

DEVICE_TYPE = "cuda" if torch.cuda.device_count() > 1 else "cpu"  # NCCL where two ranks have a GPU each
TIMEOUT = 10.0  # s
HEAD_START = 2.0  # s, in which rank 0 comes to the store, and when all start anew rank 1 to what rank 0 had left there


def main(folder, times, dying=""):
    if dying and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) in (("1", "0"), ("0", "1")):
        time.sleep(HEAD_START)
        if os.environ["RANK"] == "1":
            sys.exit(1)
    for _ in range(int(times)):
        with started(ShardingConfig("edges", model=2, timeout=TIMEOUT), DEVICE_TYPE) as mesh:
            count = torch.ones(1, device=mesh.device_type)
            dist.all_reduce(count, group=mesh.get_group("model"))
            with (Path(folder) / f"{dist.get_rank()}.txt").open("a") as file:
                file.write(f"{count.item():g} ")


if __name__ == "__main__":
    main(*sys.argv[1:])
