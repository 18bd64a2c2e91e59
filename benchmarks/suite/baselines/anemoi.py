"""anemoi-models: its Triton operator as its graph-transformer block calls it.

`GraphTransformerBaseBlock` embeds the attributes with a linear layer, converts the edge_index,
sorted by destination, to both sides at every call of every layer, gradients wanted or not, and
calls the operator. Batches are one large graph there, with the attributes repeated for each sample;
that graph is made here outside what is timed.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import linear

from suite.baselines import missing
from suite.graphs import Coo
from suite.operands import Operands
from suite.problems import Problem

TITLE = "anemoi-models"
PACKAGES = ("anemoi-models", "torch", "triton", "torch-geometric")


def unsupported_reason(problem: Problem, device: str) -> str | None:
    """Its kernels need a GPU."""
    if device != "cuda":
        return "its kernels run on a GPU"
    return missing("anemoi.models", "anemoi-models")


def attention(operands: Operands) -> Callable[[], Tensor]:
    """Bind embedding, conversion and operator."""
    whole = operands.side_by_side()
    return lambda: attend(operands, *convert(whole.coo))


def attend(operands: Operands, csc: tuple, reverse: tuple) -> Tensor:
    """Embed the attributes and call the operator on a converted graph."""
    from anemoi.models.triton.gt import graph_transformer_attention_conv

    query, key, value = operands.nodes()
    edges = linear(operands.attributes(), operands.edge_weight, operands.edge_bias).view(
        -1, *query.shape[1:]
    )
    return graph_transformer_attention_conv(query, key, value, edges, csc, reverse).view(
        operands.grad_out.shape
    )


def convert(coo: Coo) -> tuple[tuple, tuple]:
    """Both sides of a graph in the form that the operator takes."""
    from anemoi.models.triton.utils import edge_index_to_csc

    csc, _, reverse = edge_index_to_csc(
        coo.edge_index, num_nodes=coo.sizes, reverse=True, edges_are_dst_sorted=True
    )
    return csc, reverse
