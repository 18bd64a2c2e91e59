"""Processors: stacks of blocks on one set of nodes, with activation checkpointing by groups.

x    = proc[l](x, graph, edge_attr)                            graph transformer, for each layer l
x, e = proc[l](x, graph, e), e = emb_edges(edge_attr) at first  graph network
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.activation_checkpointing import checkpoint_activations, chunk_result
from anemoi_gt.nn.block import GraphTransformerProcessorBlock
from anemoi_gt.nn.chunking import Chunk
from anemoi_gt.nn.interaction_network import InteractionBlock, apply_mlp
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.mlp import NormedMLP, hidden_width
from anemoi_gt.option_checks import check_integer
from anemoi_gt.torch_compat import is_exporting


class BaseProcessor(nn.Module):
    """Base class of both processors: blocks, and groups of them for activation checkpointing."""

    proc: Any  # ModuleList of blocks

    def __init__(self, num_layers: int, checkpoint_groups: int | None):
        super().__init__()
        check_integer("num_layers", num_layers)
        if checkpoint_groups is not None:
            check_integer("checkpoint_groups", checkpoint_groups, least=None, note=", or None")
            if not 1 <= checkpoint_groups <= num_layers:
                allowed = f"1 .. {num_layers}, the number of layers, or None"
                raise ValueError(f"checkpoint_groups must be in {allowed}, got {checkpoint_groups}")
        self.checkpoint_groups = checkpoint_groups
        self.proc = nn.ModuleList()

    def run_groups(
        self, run: Callable[..., Any], state: Any, *inputs: Any, device: torch.device
    ) -> Any:
        """Return the state, a tensor or a tuple, after `run(block, state, *inputs)` of all blocks.

        With `checkpoint_groups`, only the state between two groups is kept for the backward pass.
        """
        if self.checkpoint_groups is None:
            return _run_blocks(run, self.proc, state, *inputs)
        layers = len(self.proc)
        groups = self.checkpoint_groups
        for i in range(groups):
            group = self.proc[layers * i // groups : layers * (i + 1) // groups]
            draws = self.training and any(getattr(block, "dropout", 0) > 0 for block in group)
            state = checkpoint_activations(
                _run_group, run, group, state, *inputs, device=device, draws=draws
            )
        return state


class GraphTransformerProcessor(BaseProcessor):
    """Stack of processor blocks, with the state dict of Anemoi's `GraphTransformerProcessor`.

    Parameters
    ----------
    num_layers : int
        Number of blocks.
    num_channels : int
        Features of a node.
    mlp_hidden_ratio : float
        Width of the hidden layers of the feed-forward networks over `num_channels`.
    checkpoint_groups : int, optional
        Activation checkpointing: number of groups of consecutive blocks, equal in size to within
        one; only the input of each group is kept for the backward pass. None keeps all activations.
    **block_options
        Of `GraphTransformerProcessorBlock`: num_heads, edge_dim, and its options.

    Raises
    ------
    ValueError
        When num_layers is below 1, or checkpoint_groups not in 1 .. num_layers.

    Examples
    --------
    >>> processor = GraphTransformerProcessor(
    ...     num_layers=3, num_channels=16, num_heads=2, edge_dim=3, checkpoint_groups=2)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), 5)
    >>> processor(torch.randn(5, 16), graph, torch.randn(3, 3)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_channels: int,
        mlp_hidden_ratio: float = 4,
        checkpoint_groups: int | None = None,
        **block_options: Any,
    ):
        super().__init__(num_layers, checkpoint_groups)
        for _ in range(num_layers):
            block = GraphTransformerProcessorBlock(
                in_channels=num_channels,
                out_channels=num_channels,
                hidden_dim=hidden_width(num_channels, mlp_hidden_ratio),
                **block_options,
            )
            self.proc.append(block)

    def forward(
        self,
        x: Tensor,
        graph: GraphStructure | Sequence[Chunk],
        edge_attr: Tensor,
        *,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Return the nodes [N, num_channels] or [B, N, num_channels] after all blocks.

        Parameters
        ----------
        x : Tensor [N, num_channels] or [B, N, num_channels]
        graph : GraphStructure, or its chunks from `split_destinations`
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes in the caller's edge order.
        cond : Tensor [N or 1, K] or [B, N or 1, K], optional
            Condition of conditional norms.
        """
        device = edge_attr.device
        return self.run_groups(_run_transformer, x, graph, edge_attr, cond, device=device)


class GNNProcessor(BaseProcessor):
    """Stack of graph-network blocks, with the parameters of Anemoi's class of this name.

    An MLP embeds the edge attributes; each block updates the edges, then the nodes. The keys of
    Anemoi's state dict are the same, except that `emb_edges` belongs to its first block
    (`proc.0.emb_edges`).

    Parameters
    ----------
    num_layers : int
        Number of blocks.
    num_channels : int
        Features of a node, and of an embedded edge.
    edge_dim : int
        Attributes of an edge.
    mlp_hidden_ratio : float
        Width of the hidden layers over `num_channels`.
    checkpoint_groups : int, optional
        Activation checkpointing, as for `GraphTransformerProcessor`.
    hidden_layers : int
        Hidden layers of each MLP; Anemoi has two.
    mlp_implementation : {"mlp", "glu", "swiglu", "geglu", "reglu"}
        Plain or gated hidden layers.
    layer_kernels : LayerKernels
        Classes of the submodules, as for `InteractionBlock`.
    sum_of : {"edges", "updates"}
        What is summed over in-edges: updated edges as in Anemoi, or their updates as in GraphCast.
    config : KernelConfig
        Backend and precision.

    Raises
    ------
    ValueError
        When num_layers is below 1, checkpoint_groups not in 1 .. num_layers, or for options that
        `InteractionBlock` refuses.

    Examples
    --------
    >>> processor = GNNProcessor(num_layers=3, num_channels=16, edge_dim=3, checkpoint_groups=2)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), 5)
    >>> processor(torch.randn(5, 16), graph, torch.randn(3, 3)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_channels: int,
        edge_dim: int,
        mlp_hidden_ratio: float = 1,
        checkpoint_groups: int | None = None,
        hidden_layers: int = 1,
        mlp_implementation: str = "mlp",
        layer_kernels: LayerKernels = LayerKernels(),  # noqa: B008  frozen, as config
        sum_of: str = "edges",
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__(num_layers, checkpoint_groups)
        check_integer("edge_dim", edge_dim)
        self.config = config
        hidden_dim = hidden_width(num_channels, mlp_hidden_ratio)
        for _ in range(num_layers):
            block = InteractionBlock(
                num_channels,
                num_channels,
                hidden_dim,
                hidden_layers,
                mlp_implementation=mlp_implementation,
                layer_kernels=layer_kernels,
                sum_of=sum_of,
                config=config,
            )
            self.proc.append(block)
        networks = (mlp_implementation, layer_kernels, hidden_layers)
        self.emb_edges = NormedMLP(edge_dim, hidden_dim, num_channels, *networks)

    def forward(self, x: Tensor, graph: GraphStructure | ShardedGraph, edge_attr: Tensor) -> Tensor:
        """Return the nodes [N, num_channels] or [B, N, num_channels] after all blocks.

        Parameters
        ----------
        x : Tensor [N, num_channels] or [B, N, num_channels]
        graph : GraphStructure or ShardedGraph
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes in the caller's edge order.
        """
        edges = apply_mlp(self, "emb_edges", edge_attr, self.config)
        x, _ = self.run_groups(_run_graph_network, (x, edges), graph, device=edges.device)
        return x


def _run_blocks(run: Callable[..., Any], blocks: nn.ModuleList, state: Any, *inputs: Any) -> Any:
    for block in blocks:
        state = run(block, state, *inputs)
    return state


def _run_group(run: Callable[..., Any], blocks: nn.ModuleList, state: Any, *inputs: Any) -> Any:
    state = _run_blocks(run, blocks, state, *inputs)
    # an export has no operator of this library, and no backward pass
    if not torch.compiler.is_compiling() or is_exporting():
        return state
    if isinstance(state, tuple):
        return tuple(chunk_result(rows) for rows in state)
    return chunk_result(state)


def _run_transformer(
    block: nn.Module, x: Tensor, graph: Any, edge_attr: Tensor, cond: Tensor | None
) -> Tensor:
    return block(x, graph, edge_attr, cond=cond)


def _run_graph_network(
    block: nn.Module, state: tuple[Tensor, Tensor], graph: Any
) -> tuple[Tensor, Tensor]:
    x, edges = state
    return block(x, graph, edges)
