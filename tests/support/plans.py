"""Plans that are cut otherwise than the package cuts them, for tests of small sizes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from anemoi_gt.ops.triton_backend.edge_attention_triton import edge_attention_triton
from anemoi_gt.ops.triton_backend.formulas import (
    attention_triton,
    interaction_triton,
    network_triton,
)
from anemoi_gt.ops.triton_backend.tiles import Tuning

OPERATORS = (
    edge_attention_triton,
    attention_triton,
    network_triton,
    interaction_triton,
)


@contextmanager
def new_plans(**tuning: int) -> Iterator[None]:
    """Make plans with these fields of `Tuning` in the context, in an empty cache."""
    with ExitStack() as caches:
        for operator in OPERATORS:
            cache = operator.new_cache(Tuning(**tuning))
            caches.enter_context(mock.patch.object(operator, "plans_of", cache))
        yield
