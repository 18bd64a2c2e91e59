"""Launch plans that are not cached, for tests that change what a plan depends on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from anemoi_gt.ops.triton_backend import attention_sublayer, edge_attention_triton
from anemoi_gt.ops.triton_backend.attention_sublayer import attention_sublayer_triton
from anemoi_gt.ops.triton_backend.edge_attention_triton import (
    edge_attention_triton as edge_attention,
)
from anemoi_gt.ops.triton_backend.feed_forward_sublayer import feed_forward_triton
from anemoi_gt.ops.triton_backend.sizes import sizes_of


@contextmanager
def new_plans(**sizes) -> Iterator[None]:
    """Use an empty cache of plans in the context, and replace some sizes of each call."""

    def changed(*arguments, **options):
        return sizes_of(*arguments, **options)._replace(**sizes)

    with ExitStack() as patches:
        for operator in (edge_attention, attention_sublayer_triton, feed_forward_triton):
            patches.enter_context(mock.patch.object(operator, "plans_of", operator.new_cache()))
        for module in (edge_attention_triton, attention_sublayer):
            patches.enter_context(mock.patch.object(module, "sizes_of", changed))
        yield
