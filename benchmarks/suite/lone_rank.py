"""One rank of several by itself on one GPU: it computes as in a job, without messages.

Time and memory are as in a real job, except that messages are replaced by copies of local rows. The
results are meaningless, but have a realistic magnitude: a GPU is faster on NaN or zeros.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from anemoi_gt.distributed import halo
from anemoi_gt.distributed.partition import Ranges


def start(rank: int, num_ranks: int) -> None:
    """Initialise a process group with no-op collectives; a too large `rank` is the last."""
    rank = min(rank, num_ranks - 1)
    os.environ |= {"LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    halo.HaloExchange.of_requests = _mirrored
    halo.HaloExchange.send = lambda self, sent: _repeated(sent, self.num_received)
    halo.HaloExchange.send_reverse = lambda self, returned: _repeated(returned, self.num_sent)


def _repeated(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows] * (1 + count // max(len(rows), 1)))[:count]


def _mirrored(wanted: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> halo.HaloExchange:
    """Return an exchange that sends each rank as many rows as it receives."""
    counts = torch.bincount(ranges.owner(wanted), minlength=ranges.num_ranks).tolist()
    rows = torch.cat([torch.arange(count, device=wanted.device) for count in counts])
    positions = halo._sent_position(rows, counts, ranges.counts[dist.get_rank(group)])
    return halo.HaloExchange(group.group_name, rows, tuple(counts), tuple(counts), positions)
