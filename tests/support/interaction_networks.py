"""Graph networks as modules: blocks to test, and what they compute, in plain PyTorch from the values of a state dict."""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from anemoi_gt import GraphStructure, InteractionBlock, KernelConfig
from anemoi_gt.nn import AutocastLayerNorm, ConditionalLayerNorm, LayerKernels
from support.pairwise import pairwise

NORMS = {
    "layer norm": nn.LayerNorm,
    "autocast layer norm": AutocastLayerNorm,
    "RMSNorm": nn.RMSNorm,
    "none": nn.Identity,
    "conditional": partial(ConditionalLayerNorm, condition_shape=3),
}
ACTIVATIONS = {"gelu": (nn.GELU, functional.gelu), "silu": (nn.SiLU, functional.silu)}
GATES = {"glu": torch.sigmoid, "swiglu": functional.silu, "reglu": torch.relu}
CASES = pairwise(
    norm=tuple(NORMS),
    activation=tuple(ACTIVATIONS),
    implementation=("mlp", "mlp", *GATES),
    hidden_layers=(1, 2),
    nodes=("one set", "two sets"),
    batch=("none", "of nodes", "of nodes and edges"),
    rows=("float32", "16 bits"),
    edges=(29, 0),
    sum_of=("edges", "updates"),
    dtype=(torch.float32, torch.bfloat16),
)
DST, SRC = 9, 7
TORCH = KernelConfig("torch")


class Case(NamedTuple):
    """Options of a block and its inputs."""

    norm: str = "layer norm"
    activation: str = "gelu"
    implementation: str = "mlp"
    hidden_layers: int = 1
    nodes: str = "two sets"
    batch: str = "of nodes"
    rows: str = "float32"
    edges: int = 29
    sum_of: str = "edges"


class Problem(NamedTuple):
    """A block, its inputs by name, and its edges, unsorted; the last destination has none."""

    case: Case
    block: InteractionBlock
    inputs: dict
    edge_index: torch.Tensor
    num_nodes: tuple

    @property
    def graph(self):
        """The edges as a structure."""
        return GraphStructure.from_edge_index(self.edge_index, self.num_nodes)

    def call(self, call=None, edges=None, **inputs):
        """Call the block, or another function, on the inputs or others."""
        given = self.inputs | inputs
        x = given["x_dst"] if "x_src" not in given else (given["x_src"], given["x_dst"])
        call = self.block if call is None else call
        arguments = [x, self.graph if edges is None else edges, given["edge_attr"]]
        if "cond" in given:
            arguments.append(given["cond"])
        return call(*arguments)

    def results(self, call=None, edges=None, autocast=None):
        """Return outputs and gradients by name, of the inputs and all parameters."""
        inputs = {name: x.detach().requires_grad_() for name, x in self.inputs.items()}
        with autocast or nullcontext():
            outputs = self.call(call, edges, **inputs)
        return _results(outputs, inputs | dict(self.block.named_parameters()))

    def plain_results(self, dtype=None, autocast=None):
        """Return the same of plain PyTorch, in a dtype or in those of inputs and parameters."""
        values = self.inputs | dict(self.block.named_parameters())
        leaves = {
            name: value.detach().to(dtype or value.dtype).requires_grad_()
            for name, value in values.items()
        }
        with autocast or nullcontext():
            outputs = plain_block(leaves, self.edge_index, self.case)
        return _results(outputs, leaves)


def make(device="cpu", dtype=torch.float32, config=TORCH, seed=0, **case):
    """Return a problem whose norms have parameters that matter; `dtype` is that of 16-bit rows."""
    case = Case(**case)
    torch.manual_seed(seed)
    one = case.nodes == "one set"
    channels = (12, 12) if one else (8, 12)
    num_nodes = (DST, DST) if one else (SRC, DST)
    activation, _ = ACTIVATIONS[case.activation]
    block = InteractionBlock(
        channels,
        24,
        16,
        case.hidden_layers,
        mlp_implementation=case.implementation,
        layer_kernels=LayerKernels(LayerNorm=NORMS[case.norm], Activation=activation),
        sum_of=case.sum_of,
        config=config,
    )
    for name, parameter in block.named_parameters():
        if "layer_norm" in name:
            nn.init.normal_(parameter, float(name.endswith("weight")), 0.2)
    batch = () if case.batch == "none" else (2,)
    inputs = {"x_dst": torch.randn(*batch, DST, 12)}
    if not one:
        inputs["x_src"] = torch.randn(*batch, SRC, 8)
    edge_batch = batch if case.batch == "of nodes and edges" else ()
    inputs["edge_attr"] = torch.randn(*edge_batch, case.edges, 24)
    row_dtype = dtype if case.rows == "16 bits" else torch.float32
    inputs = {name: x.to(device, row_dtype) for name, x in inputs.items()}
    if case.norm == "conditional":  # of each batch entry, or of all
        inputs["cond"] = torch.randn(*batch, 1, 3).to(device)
    ends = [torch.randint(size, (case.edges,)) for size in (num_nodes[0], DST - 1)]
    edge_index = torch.stack(ends).to(device)
    return Problem(case, block.to(device), inputs, edge_index, num_nodes)


def plain_block(values, edge_index, case):
    """Return destinations and edges after a block."""
    x_dst, edges = values["x_dst"], values["edge_attr"]
    x_src = values.get("x_src", x_dst)
    source, destination = edge_index
    edges = edges.expand(*x_dst.shape[:-2], *edges.shape[-2:])
    rows = _side_by_side(x_dst[..., destination, :], x_src[..., source, :], edges)
    update = _network(values, "conv.edge_mlp", rows, case)
    edges = (edges + update).to(edges.dtype)
    terms = update if case.sum_of == "updates" else edges
    terms = terms.to(torch.promote_types(edges.dtype, torch.float32))
    sums = terms.new_zeros(*x_dst.shape[:-1], edges.shape[-1])
    sums = sums.index_add(-2, destination, terms).to(edges.dtype)
    nodes = x_dst + _network(values, "node_mlp", _side_by_side(x_dst, sums), case)
    return nodes.to(x_dst.dtype), edges


def _network(values, name, rows, case):
    def mapped(path, rows):
        path = f"{name}.mlp.{path}"
        return functional.linear(rows, values[f"{path}.weight"], values[f"{path}.bias"])

    number = 0
    for _ in range(case.hidden_layers):
        if case.implementation == "mlp":
            _, activate = ACTIVATIONS[case.activation]
            rows = activate(mapped(number, rows))
            number += 2
        else:
            gate = GATES[case.implementation](mapped(f"{number}.gate_proj", rows))
            rows = gate * mapped(f"{number}.value_proj", rows)
            number += 1
    out = mapped(number, rows)
    if case.norm == "none":
        return out
    if case.norm == "conditional":
        scale, shift = (
            functional.linear(
                values["cond"],
                values[f"{name}.layer_norm.{part}.weight"],
                values[f"{name}.layer_norm.{part}.bias"],
            )
            for part in ("scale", "bias")
        )
        return (1 + scale) * functional.layer_norm(out, out.shape[-1:]) + shift
    weight = values[f"{name}.layer_norm.weight"]
    if case.norm == "RMSNorm":
        return functional.rms_norm(out, weight.shape, weight, torch.finfo(torch.float32).eps)
    return functional.layer_norm(out, weight.shape, weight, values[f"{name}.layer_norm.bias"])


def _side_by_side(*rows):
    """Return rows side by side, in float32 at least: autocast does not mix both 16-bit dtypes."""
    return torch.cat([x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows], -1)


def _results(outputs, leaves):
    """Return outputs and gradients by name, for a loss with a weight per element."""
    loss, generator = 0.0, torch.Generator().manual_seed(0)
    named = dict(zip(("out", "edges"), outputs, strict=True))
    for out in named.values():
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        loss = loss + (out.double() * weight.to(out.device)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {name: out.detach() for name, out in named.items()}
    return results | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
