"""The model of benchmarks/sharding.py: an encoder-processor-decoder, cut to the rows of a rank."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.distributed.model_shard import shard_model
from anemoi_gt.training.compilation import compile_blocks

FIELDS = 100  # in and out of the data grid


@dataclass(frozen=True)
class Case:
    """What is run."""

    grid: str
    refinement: int
    heads: int
    channels: int
    layers: int
    ranks: int
    way: str
    compiled: bool = False  # its blocks

    @property
    def width(self) -> int:
        """Features of a node."""
        return self.heads * self.channels

    @property
    def graph(self) -> str:
        """What its graph is called."""
        return f"{self.grid}-{self.refinement}"


class ShardedModel:
    """The model of a case on this rank, and its rows of one sample.

    Parameters
    ----------
    case : Case
    graph : HeteroData
        Of `weather_graph`.
    mesh : DeviceMesh
        With axes (data, model), of the ranks of the case.
    device : torch.device
    """

    def __init__(self, case: Case, graph, mesh: DeviceMesh, device: torch.device):
        self.case = case
        torch.manual_seed(0)
        sizes = {"channels": case.width, "heads": case.heads, "num_layers": case.layers}
        with device:  # weights are drawn where they stay
            self.model = EncoderProcessorDecoder(graph, FIELDS, FIELDS, **sizes)
        self.model.to(device)
        self.cut = shard_model(self.model, mesh)
        if case.compiled:
            compile_blocks(self.model)
        num_nodes = graph["data"].x.shape[0]
        own = self.cut.partitions["data"].nodes(self.cut.rank, "cpu")
        fields = torch.randn(num_nodes, FIELDS, generator=torch.Generator().manual_seed(1))
        self.fields, self.scale = fields[own].unsqueeze(0).to(device), 1 / (num_nodes * FIELDS)

    def step(self, dtype: torch.dtype | None) -> Tensor:
        """Forward and backward, under autocast to a dtype or as it is; returns this rank's part of the loss, a mean square."""
        self.model.zero_grad()
        with torch.autocast(self.fields.device.type, dtype=dtype, enabled=dtype is not None):
            out = self.model(self.fields)
        loss = out.float().square().sum() * self.scale
        loss.backward()
        return loss.detach()

    def judged(self) -> list[Tensor]:
        """Gradients that tell whether the ranks computed the same: of encoder, processor and decoder."""
        encoder, decoder = self.model.encoder["data"], self.model.decoder["data"]
        block = self.model.processor.proc[0]
        parameters = (
            encoder.emb_nodes_src.weight,
            block.lin_edge.weight,
            block.lin_key.weight,
            decoder.proc.lin_value.weight,
        )
        return [parameter.grad for parameter in parameters]

    def graphs(self) -> dict:
        """What each block attends on, by step of the model."""
        encoder, decoder = self.model.encoder_edges["data"], self.model.decoder_edges["data"]
        parts = {"encoder": encoder, "processor": self.model.processor_edges, "decoder": decoder}
        return {step: part.structure() for step, part in parts.items()}


def weather_graph(case: Case):
    """The graph of a case, on the CPU."""
    return icosphere_graph(grid(case.grid), refinement=case.refinement)
