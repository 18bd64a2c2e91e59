"""`edge_attention`: the public operation. Checks, one rule for dtypes, the choice of a backend; the work is the backend's."""

import torch
from torch import Tensor

from anemoi_gt.config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.backends import choose_backend
from anemoi_gt.ops.checks import check_dropout, check_operands
from anemoi_gt.ops.dtypes import cast_operands


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    config: AttentionConfig = AttentionConfig(),  # noqa: B008  frozen, hence one value for all calls
) -> tuple[Tensor, Tensor]:
    """Attend over the in-edges of every destination, with edge features in key and value.

    For destination i, source j, edge e = (j -> i) and each head, with x_e = W a_e + b the embedded edge attributes:

        s_e   = scale * < q_i , k_j + x_e >
        lse_i = log sum_e exp(s_e)                      -inf when i has no in-edge
        out_i = sum_e exp(s_e - lse_i) (v_j + x_e)      0    when i has no in-edge

    Nothing of size [E, H, C] is made from raw edge attributes: the embedding is linear and factors out of the sums.

    Parameters
    ----------
    query : Tensor [N_dst, H, C] or [B, N_dst, H, C]
        float16, bfloat16, float32 or float64. Its leading batch dimension shares the graph.
    key, value : Tensor [N_src, H, C] or [B, N_src, H, C]
    graph : GraphStructure
        Built once. When key or value need a gradient and it has no source side, that is built in passing.
    edge_attr : Tensor, optional
        With `edge_weight`: raw attributes [E, D], or [B, E, D] for one set per sample. Without: already embedded
        [E, H, C] or [B, E, H, C]. In the caller's edge order.
    edge_weight : Tensor [H * C, D], optional
        W, in the layout of `torch.nn.Linear`.
    edge_bias : Tensor [H * C], optional
        b; needs `edge_weight`.
    scale : float, optional
        Default 1 / sqrt(C).
    dropout_p : float
        Probability with which each attention weight is dropped; survivors grow by 1 / (1 - dropout_p). The mask depends
        on a seed from PyTorch's generator, on sample, edge and head, not on the order or the sharding of the edges.
    config : AttentionConfig
        Backend and precision.

    Returns
    -------
    out : Tensor, shape of query
        In the dtype of query, or of autocast where that is active and `config.precision` is None.
    lse : Tensor [N_dst, H] or [B, N_dst, H]
        Logarithm of the sum of exponentials, float32 (float64 for float64 inputs), never dropped out; differentiable.

    Raises
    ------
    ValueError
        When shapes, dtypes or devices do not fit, or `config.backend` names a backend that cannot run; each message says
        what must hold and what came.

    Notes
    -----
    Mixed dtypes: with `config.precision` everything is cast to it; else inside autocast everything (float64 apart) to
    autocast's dtype; else everything to the dtype of query. Sums and softmax are float32, or float64 for float64.
    The result is bitwise reproducible. A second derivative raises RuntimeError.

    Examples
    --------
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 3))
    >>> out, lse = edge_attention(torch.zeros(3, 1, 2), torch.zeros(2, 1, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), graph)
    >>> out[:, 0].tolist()
    [[2.0, 3.0], [3.0, 4.0], [0.0, 0.0]]
    >>> lse.exp().flatten().tolist()
    [2.0, 1.0, 0.0]

    References
    ----------
    Shi et al. (2021), Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification,
    section 3.1 (attention with edge features).
    """
    check_operands(query, key, value, graph, edge_attr, edge_weight, edge_bias)
    check_dropout(dropout_p)
    operands, out_dtype = cast_operands(config.precision, query, key, value, edge_attr, edge_weight, edge_bias)
    q, k, v, attr, weight, bias = operands
    if query.dim() == 4 and attr is not None and attr.dim() == (3 if weight is None else 2):
        attr = attr.unsqueeze(0)  # one set for all samples
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        graph = graph.with_reverse()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seed = _draw_seed(query.device) if dropout_p > 0 else None
    backend = choose_backend(config.backend, q)
    out, lse = backend.attend(q, k, v, graph, attr, weight, bias, seed, float(scale), float(dropout_p))
    return out.to(out_dtype), lse


def _draw_seed(device: torch.device) -> Tensor:
    """Draw a seed [1] from the device's generator, so that manual_seed and activation checkpointing give it again."""
    return torch.randint(2**62, (1,), device=device)
