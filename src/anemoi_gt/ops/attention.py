"""`edge_attention`, the public operation: checks, dtypes and choice of a backend."""

from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig, check_config
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import choose_backend
from anemoi_gt.ops.dropout import draw_seed
from anemoi_gt.ops.dtypes import cast_operands
from anemoi_gt.ops.tensors import (
    AttentionOperands,
    CallSizes,
    EdgeAttentionOptions,
    check_operands,
    check_scale,
)
from anemoi_gt.option_checks import check_probability


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
    config: KernelConfig = KernelConfig(),  # noqa: B008  frozen
) -> tuple[Tensor, Tensor]:
    """Attend over the in-edges of every destination, with edge features in key and value.

    For destination i, source j, edge e = (j -> i) and each head, with x_e = W a_e + b the embedded
    edge attributes:

        s_e   = scale * < q_i , k_j + x_e >
        lse_i = log sum_e exp(s_e)                      -inf when i has no in-edge
        out_i = sum_e exp(s_e - lse_i) (v_j + x_e)      0    when i has no in-edge

    Raw edge attributes are never embedded into a tensor [E, H, C]: the embedding is linear and
    factors out of the sums.

    Parameters
    ----------
    query : Tensor [N_dst, H, C] or [B, N_dst, H, C]
        float16, bfloat16, float32 or float64. The batch shares the graph.
    key, value : Tensor [N_src, H, C] or [B, N_src, H, C]
    graph : GraphStructure
        Built once. If key or value need a gradient and it was made with `reverse=False`, the
        reverse structure is built in every call.
    edge_attr : Tensor, optional
        With `edge_weight`: raw attributes [E, D] or [B, E, D]. Without: embedded features [E, H, C]
        or [B, E, H, C]. In the caller's edge order.
    edge_weight : Tensor [H * C, D], optional
        W, in the layout of `torch.nn.Linear`.
    edge_bias : Tensor [H * C], optional
        b; needs `edge_weight`.
    scale : float, optional
        Default 1 / sqrt(C).
    dropout_p : float
        Probability of dropping each attention weight; the others are scaled by 1 / (1 - dropout_p).
        The mask is a function of a seed from PyTorch's generator, the batch index, the global edge
        id and the head, so it does not depend on the order or sharding of the edges.
    config : KernelConfig
        Backend and precision.

    Returns
    -------
    out : Tensor, shape of query
        In the dtype of query, or in autocast's dtype if autocast is active and `config.precision`
        is None.
    lse : Tensor [N_dst, H] or [B, N_dst, H]
        Logarithm of the sum of exponentials before dropout, float32 (float64 for float64 inputs);
        differentiable.

    Raises
    ------
    ValueError
        If shapes, dtypes or devices are inconsistent, or `config.backend` names a backend that
        cannot run.
    RuntimeError
        For double backward, forward-mode derivatives and `torch.func.grad`.

    Notes
    -----
    All operands are cast to one dtype: `config.precision` if set, else autocast's where active
    (except float64), else the dtype of query. Sums and softmax are float32, or float64 for float64.
    The result is bitwise reproducible, unless edges were grouped without sorting (`stable=False`,
    `KernelConfig.stable_sort`).

    Examples
    --------
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 3))
    >>> value = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> out, lse = edge_attention(torch.zeros(3, 1, 2), torch.zeros(2, 1, 2), value, graph)
    >>> out[:, 0].tolist()
    [[2.0, 3.0], [3.0, 4.0], [0.0, 0.0]]
    >>> lse.exp().flatten().tolist()
    [2.0, 1.0, 0.0]

    References
    ----------
    Shi et al. (2021), Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification, section 3.1 (attention with edge features).
    """
    check_config(config)
    check_scale(scale)
    check_probability("dropout_p", dropout_p)
    operands = AttentionOperands(query, key, value, edge_attr, edge_weight, edge_bias)
    check_operands(operands, graph)
    operands, out_dtype = cast_operands(config.precision, operands)
    q, k, v, attr, weight, bias = operands
    unbatched_dim = 3 if weight is None else 2  # embedded [E, H, C] or raw [E, D]
    if query.dim() == 4 and attr is not None and attr.dim() == unbatched_dim:
        # all elements of the batch share the attributes
        operands = AttentionOperands(q, k, v, attr.unsqueeze(0), weight, bias)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    sizes, dtype, _ = CallSizes.of_attention(operands, graph.num_edges)
    backend = choose_backend(config.backend, sizes, Dtypes(dtype), q.device)
    if backend.attention is None:
        raise ValueError(f"backend {backend.name!r} must have an attention, got one without")
    if needs_gradient(k, v):
        graph = graph.with_reverse(stable=config.stable_sort)
    options = EdgeAttentionOptions(float(scale), float(dropout_p), config.replay)
    out, lse = backend.attention(operands, graph, seed, options)
    return out.to(out_dtype), lse
