"""Launch plans that are not cached, for tests that change what a plan depends on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from unittest import mock

from anemoi_gt.ops.triton_backend import (
    attention_sublayer,
    edge_attention_triton,
    feed_forward_sublayer,
)
from anemoi_gt.ops.triton_backend.sizes import sizes_of


@contextmanager
def new_plans(**sizes) -> Iterator[None]:
    """Use an empty cache of plans in the context, and replace some sizes of each call."""

    def changed(*arguments, **options):
        return sizes_of(*arguments, **options)._replace(**sizes)

    with ExitStack() as patches:
        cached = [
            (edge_attention_triton, "forward_plan"),
            (edge_attention_triton, "backward_plan"),
            (attention_sublayer, "plans_of"),
            (feed_forward_sublayer, "plans_of"),
        ]
        for module, name in cached:
            make = lru_cache(getattr(module, name).__wrapped__)
            patches.enter_context(mock.patch.object(module, name, make))
        for module in (edge_attention_triton, attention_sublayer):
            patches.enter_context(mock.patch.object(module, "sizes_of", changed))
        yield
