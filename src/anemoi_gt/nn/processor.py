"""GraphTransformerProcessor: a stack of blocks, with activation checkpointing by groups.

x = proc[l](x, graph, edge_attr)          for each layer l
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.activation_checkpointing import checkpoint_activations, chunk_result
from anemoi_gt.nn.block import GraphTransformerProcessorBlock
from anemoi_gt.nn.chunking import Chunk
from anemoi_gt.nn.input_validation import check_features, stored_parameter
from anemoi_gt.nn.mlp import hidden_width
from anemoi_gt.option_checks import check_integer
from anemoi_gt.torch_compat import is_exporting


class GraphTransformerProcessor(nn.Module):
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

    proc: Any  # ModuleList of GraphTransformerProcessorBlock

    def __init__(
        self,
        *,
        num_layers: int,
        num_channels: int,
        mlp_hidden_ratio: float = 4,
        checkpoint_groups: int | None = None,
        **block_options: Any,
    ):
        super().__init__()
        check_integer("num_layers", num_layers)
        if checkpoint_groups is not None:
            check_integer("checkpoint_groups", checkpoint_groups, least=None, note=", or None")
            if not 1 <= checkpoint_groups <= num_layers:
                allowed = f"1 .. {num_layers}, the number of layers, or None"
                raise ValueError(f"checkpoint_groups must be in {allowed}, got {checkpoint_groups}")
        self.checkpoint_groups = checkpoint_groups
        self.proc = nn.ModuleList()
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
        first = self.proc[0]
        # its device is needed below
        check_features("x", x, first.channels, like=stored_parameter(first.lin_query))
        if self.checkpoint_groups is None:
            return _run(self.proc, x, graph, edge_attr, cond)
        layers = len(self.proc)
        groups = self.checkpoint_groups
        for i in range(groups):
            group = self.proc[layers * i // groups : layers * (i + 1) // groups]
            draws = self.training and any(block.dropout > 0 for block in group)
            x = checkpoint_activations(
                _run_group, group, x, graph, edge_attr, cond, device=x.device, draws=draws
            )
        return x


def _run_group(*inputs: Any) -> Tensor:
    x = _run(*inputs)
    # an export has no operator of this library, and no backward pass
    return chunk_result(x) if torch.compiler.is_compiling() and not is_exporting() else x


def _run(
    blocks: nn.ModuleList,
    x: Tensor,
    graph: GraphStructure | Sequence[Chunk],
    edge_attr: Tensor,
    cond: Tensor | None,
) -> Tensor:
    for block in blocks:
        x = block(x, graph, edge_attr, cond=cond)
    return x
