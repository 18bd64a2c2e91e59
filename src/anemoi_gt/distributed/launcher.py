"""What a launcher, such as torchrun, gives the ranks of a job: variables that say who each is, and a store. The only place that reads either."""

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PAUSES = 0.01, 0.5  # s, the first and the longest between looks whether rank 0 has answered


def is_launched() -> bool:
    """Whether torchrun, or another launcher that sets the same variables, started this process."""
    return not missing_variables()


def missing_variables() -> list[str]:
    """Return the names of those that a launcher sets and that are not set here."""
    return [name for name in VARIABLES if name not in os.environ]


def own_rank() -> int:
    """Return the number of this rank in the job, before it has joined."""
    return int(os.environ["RANK"])


def local_rank() -> int:
    """Return the number of this rank among those of its host."""
    return int(os.environ["LOCAL_RANK"])


def holds_store(rank: int) -> bool:
    """Whether the store of the job ends with this rank: where the launcher does not hold it, rank 0 does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def is_first_of_host() -> bool:
    """Whether no other rank of this host comes before this one."""
    return os.environ.get("LOCAL_RANK") == "0"


def join_store(purpose: str, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of the job, this rank and their number, once all ranks are there. Collective.

    A process may start more than once under one launcher, and a launcher may start processes anew when one has died. PyTorch would name the
    keys of each start alike, and a rank could read what another wrote in a former one, such as an address where nobody listens any
    more; so each start has keys of its own. Rank 0 names it; the others answer with a token, and take the name for that of this
    start when rank 0 says their token back: what a former start left in the store does not know it. Where no launcher holds the store,
    it goes with rank 0's use of it, and a process starts once.

    Parameters
    ----------
    purpose : str
        What for; each has its own keys.
    timeout : timedelta
        How long to wait for the others, and for every key of the store.

    Raises
    ------
    torch.distributed.DistError
        When the store does not answer, or not all ranks come to it.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    place = dist.PrefixStore(f"anemoi_gt {purpose}", store)
    start = _name_start(place, size) if rank == 0 else _take_start(place, rank, timeout)
    return dist.PrefixStore(start, place), rank, size


def _name_start(place: dist.Store, size: int) -> str:
    start = uuid4().hex
    place.set("start", start)
    for other in range(1, size):
        token = place.get(f"{start} token of rank {other}").decode()
        place.set(f"{token} is of this start", start)
    return start


def _take_start(place: dist.Store, rank: int, timeout: timedelta) -> str:
    token, end, (pause, longest) = uuid4().hex, time.monotonic() + timeout.total_seconds(), PAUSES
    while time.monotonic() < end:
        start = place.get("start").decode()
        place.set(f"{start} token of rank {rank}", token)
        time.sleep(pause)  # a store that is made to wait for a key tells stderr when there is none
        if place.check([f"{token} is of this start"]):
            return place.get(f"{token} is of this start").decode()
        pause = min(2 * pause, longest)
    raise dist.DistStoreError(f"rank 0 has not named this start within {timeout.total_seconds():g} s")
