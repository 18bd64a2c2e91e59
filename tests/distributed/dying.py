"""One rank of a job in which another comes to grief: trains in a loop of collectives and writes checkpoints under `started`.

python dying.py KIND RANK FOLDER        KIND: killed, frozen, failing, all_failing, late or fine; RANK: whose grief it is
                                        host_killed: of this rank and all that follow
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from anemoi_gt.distributed import ShardingConfig, started, watch
from anemoi_gt.distributed.mesh import own_device

DEVICE_TYPE = "cuda" if torch.cuda.device_count() > 2 else "cpu"  # NCCL where three ranks have a GPU each
TIMEOUT = 4.0 if DEVICE_TYPE == "cpu" else 12.0  # s
FROZEN = TIMEOUT + 2  # s, until somebody thaws the frozen rank


def grief(kind, rank):
    if kind == "all_failing":
        raise ValueError("the config must have a heart")
    if (dist.get_rank() == rank and kind == "killed") or (dist.get_rank() >= rank and kind == "host_killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == rank and kind == "frozen":
        subprocess.Popen(["sh", "-c", f"sleep {FROZEN}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() == rank and kind == "failing":
        raise ValueError("this rank lost heart")


def let_go():
    """As a thread of gloo that is late."""
    time.sleep(0.2)
    print("let go", flush=True)


def save(path, state):
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def main(kind, rank, folder):
    with started(ShardingConfig(timeout=TIMEOUT), DEVICE_TYPE):
        state = torch.zeros(1000, device=own_device(DEVICE_TYPE))
        for step in range(20):
            if step == 10:
                print(f"grief at {time.time()}", flush=True)
                grief(kind, rank)
            dist.all_reduce(state)
            state = state + 1
            if dist.get_rank() == 0:
                save(Path(folder) / "last.pt", {"step": step, "state": state.cpu()})
    print("came to the end", flush=True)
    if kind == "late":
        watch.LETTING_GO = 2.0  # s, on a machine that is busier still
        threading.Thread(target=let_go, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
