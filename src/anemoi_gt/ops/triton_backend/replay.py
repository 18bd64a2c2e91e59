"""Passes over small graphs, replayed: the launches of one pass, kept for the next over tensors of the same sizes.

Where a kernel takes microseconds, the time of the host is the time of a call: to choose launches, to bind names and to
allocate what passes between kernels takes longer than the work. So when sizes and dtypes come again, a pass is
recorded; a later one allocates its results and one block of scratch memory, and hands addresses to the compiled
kernels. The launches are the same, and so are the results. What is kept holds numbers and compiled kernels, no tensors.

Scratch memory that is one block lives until the last launch, where otherwise each tensor ends with its last reader. So
passes with much of it, in which it is not the host that takes time, are not replayed.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import itemgetter, or_

import torch
from torch import Tensor

from anemoi_gt.kernels.jit_launch import ALIGNMENT, Launch, repeating_device
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem

NUM_OPERANDS = len(AttentionOperands._fields)
NUM_TENSORS = NUM_OPERANDS + len(IndexTensors._fields) + 1  # and the seed, the first of the options
MOST_READ, MOST_SCRATCH = 2**27, 2**28  # bytes of each tensor that a replayed pass reads, and of all between kernels
BLOCK = 512  # bytes to whose multiples scratch tensors are placed, as PyTorch's allocator places tensors


class RecordedProblem(Problem):
    """A problem that notes its launches and the tensors they are given."""

    def launch(self, launch_of: Callable[..., Launch], *how) -> Callable[..., None]:
        """Return what launches a kernel on tensors by name, and notes it."""
        found, noted = super().launch(launch_of, *how), vars(self).setdefault("launched", [])
        return lambda **tensors: noted.append((found, tensors)) or found(**tensors)


class Pass:
    """A pass over tensors of certain sizes and dtypes: recorded the second time, replayed from the third."""

    def __init__(self, compute: Callable[..., Sequence[Tensor | None]]):
        self._compute, self._launches, self._runs = compute, None, 0  # launches None: not to be replayed
        self.followed_by = {}  # passes that differentiate this one

    def run(self, tensors: Sequence[Tensor | None], options: tuple, how: object) -> Sequence[Tensor | None]:
        """Return what `compute(problem, how, *rest)` returns.

        `tensors` are operands, index tensors and seed of the problem, and the rest: contiguous, on the current device.
        """
        if self._launches is not None and (results := self._replay(tensors)) is not None:
            return results
        self._runs += 1
        is_recorded = self._runs == 2 and all(each is None or each.nbytes <= MOST_READ for each in tensors)
        if is_recorded:
            tensors = [None if each is None else each.detach() for each in tensors]  # Python objects of their own
        *problem, seed = tensors[:NUM_TENSORS]
        operands, index = AttentionOperands(*problem[:NUM_OPERANDS]), IndexTensors(*problem[NUM_OPERANDS:])
        problem = (RecordedProblem if is_recorded else Problem)(operands, index, Options(seed, *options))
        results = self._compute(problem, how, *tensors[NUM_TENSORS:])
        if is_recorded:
            self._record(tensors, problem.launched, results)
        return results

    def _replay(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if reduce(or_, addresses) % ALIGNMENT or (device := repeating_device()) is None:
            return None
        stream = self._stream_of(device)
        *results, scratch = [make and make() for make in self._makers]
        addresses += [0 if tensor is None else tensor.data_ptr() for tensor in (None, *results)]
        begin = scratch.data_ptr()
        addresses += [begin + offset for offset in self._offsets]
        for grid, run, kept, pick, values in self._launches:
            run(*grid, stream, *kept, None, None, None, *pick(addresses), *values)
        return results

    def _record(self, tensors: Sequence, launched: list[tuple[Launch, dict]], results: Sequence) -> None:
        """Keep the launches if all can be repeated, and write all results; what else they are given is scratch."""
        given, offsets, size, launches = [*tensors, None, *results], [], 0, []
        places = {id(tensor): place for place, tensor in enumerate(given)}
        missing = {id(result) for result in results if result is not None}
        for launch, named in launched:
            ordered = [named[name] for name in launch.tensors]
            for tensor in ordered:
                if id(tensor) not in places:
                    places[id(tensor)] = len(given) + len(offsets)
                    offsets.append(size)
                    size += -(-tensor.nbytes // BLOCK) * BLOCK
            missing -= set(map(id, ordered))
            if 0 in launch.grid:
                continue
            if (compiled := launch.compiled_for(ordered)) is None:
                return
            run, self._stream_of, *kept = compiled
            pick = itemgetter(*(places[id(tensor)] for tensor in ordered))
            launches.append((launch.grid, run, kept, pick, launch.values))
        if not missing and size <= MOST_SCRATCH:
            make = partial(torch.empty_strided, device=tensors[0].device)  # takes half the host's time of new_empty
            made = (*results, torch.empty(size, dtype=torch.uint8, device="meta"))
            self._makers = [
                each if each is None else partial(make, each.shape, each.stride(), dtype=each.dtype) for each in made
            ]
            self._offsets, self._launches = offsets, launches
