"""What ranks compare before they join: whether they run the same thing. The only place that compares without a collective, through the store
of the launcher: ranks that differ in their devices or in the shape of the mesh would wait for each other in the first collective.
"""

import hashlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from anemoi_gt.distributed.consensus import difference
from anemoi_gt.distributed.launcher import join_store
from anemoi_gt.distributed.watch import TELLING


@contextmanager
def meeting(values: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """Run the body, in which ranks may join a process group, unless a value is not the same on all of them.

    Parameters
    ----------
    values : mapping of str to plain values
        By name, for the message; what JSON can hold.
    timeout : float
        Seconds to wait for the other ranks.

    Raises
    ------
    ValueError
        On rank 0, naming the value and the ranks that differ from rank 0.
    SystemExit
        On the other ranks then, with status 1 and no message.
    TimeoutError
        On all ranks that came, when others did not.
    """
    said = json.dumps(dict(values), sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()
    try:
        # Held while the body runs: where no launcher holds the store, rank 0 does, and others would lose it before they join.
        place, rank, size = join_store("meeting", timedelta(seconds=timeout))
        place.set(f"said {rank}", said)
        place.set(f"digest {rank}", digest)
        digests = [f"digest {other}" for other in range(size)]
        place.wait(digests)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise TimeoutError(f"all ranks must start within {timeout:g} s of each other, got: {reason}") from None
    if any(other.decode() != digest for other in place.multi_get(digests)):
        everywhere = [json.loads(said) for said in place.multi_get([f"said {other}" for other in range(size)])]
        if rank == 0:
            raise ValueError(difference(everywhere))
        leave_last(1)
    yield


def code_in_use() -> dict[str, str]:
    """Return what this process runs: the version of PyTorch, and a short text that two hosts share when their anemoi_gt is the same."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return {"the version of torch": torch.__version__, "the code of anemoi_gt": digest.hexdigest()[:16]}


def leave_last(status: int) -> NoReturn:
    """Exit a moment after rank 0, which says why: a launcher ends all ranks when one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes from the launcher, to which this rank's status is to speak
    time.sleep(TELLING)
    raise SystemExit(status)
