"""`edge_attention`: the public operation. Checks, one rule for dtypes, the choice of a backend; the work is the backend's."""

import torch
from torch import Tensor

from anemoi_gt.attention_config import AttentionConfig, check_config
from anemoi_gt.custom_ops import refuse_forward_mode
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.backends import check_counts_heads, choose_backend
from anemoi_gt.ops.dropout import draw_seed
from anemoi_gt.ops.dtypes import cast_operands
from anemoi_gt.ops.operands import AttentionOperands, check_dropout, check_operands, check_scale


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
    dropout_seed: Tensor | None = None,
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
        on a seed, on sample, edge and head, not on the order or the sharding of the edges.
    dropout_seed : Tensor [1], int64, optional
        The seed, for calls that are to have the masks of one: parts of a graph with their `global_edge_id`. None draws one from
        PyTorch's generator where something is dropped.
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
    The result is bitwise reproducible. A second derivative raises RuntimeError, and so do tangents of
    forward mode.

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
    check_dropout(dropout_p, dropout_seed, graph)
    seed = dropout_seed if dropout_p > 0 else None
    if dropout_p > 0 and seed is None:
        seed = draw_seed(query.device)
    return _attend(query, key, value, graph, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p, config)


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    *,
    first_head: int,
    scale: float | None = None,
    dropout_p: float = 0.0,
    config: AttentionConfig = AttentionConfig(),  # noqa: B008  frozen, hence one value for all calls
) -> tuple[Tensor, Tensor]:
    """Attend as `edge_attention` does, for some of the heads of a layer, with the dropout that a call for all heads has.

    Parameters
    ----------
    query, key, value, graph, edge_attr, edge_weight, edge_bias, scale, dropout_p, config
        As for `edge_attention`, of these heads.
    first_head : int
        Number of the first of them among all heads; the others follow it.

    Returns
    -------
    out, lse : Tensor
        As of `edge_attention`.

    Raises
    ------
    ValueError
        As of `edge_attention`, and for dropout on the backend `triton`, whose kernels count heads from 0; whatever `first_head` is, so
        that callers who share the heads of a layer all raise.
    """
    check_dropout(dropout_p, None, graph)
    seed = None
    if dropout_p > 0:
        check_counts_heads(choose_backend(config.backend, query), dropout_p)
        seed = draw_seed(query.device)
        seed = torch.cat([seed, torch.full_like(seed, first_head)])
    return _attend(query, key, value, graph, edge_attr, edge_weight, edge_bias, seed, scale, dropout_p, config)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    seed: Tensor | None,
    scale: float | None,
    dropout_p: float,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor]:
    """Check and cast the operands, and hand them to the backend."""
    check_config(config)
    check_scale(scale)
    check_operands(AttentionOperands(query, key, value, edge_attr, edge_weight, edge_bias), graph)
    refuse_forward_mode(query, key, value, edge_attr, edge_weight, edge_bias)
    operands, out_dtype = cast_operands(config.precision, query, key, value, edge_attr, edge_weight, edge_bias)
    q, k, v, attr, weight, bias = operands
    if query.dim() == 4 and attr is not None and attr.dim() == (3 if weight is None else 2):
        attr = attr.unsqueeze(0)  # one set for all samples
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        graph = graph.with_reverse()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    backend = choose_backend(config.backend, q)
    operands = AttentionOperands(q, k, v, attr, weight, bias)
    out, lse = backend.attend(operands, graph, seed, float(scale), float(dropout_p), config)
    return out.to(out_dtype), lse
