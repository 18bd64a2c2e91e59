"""Compile the kernels for a GPU that need not be there, and print what came out as JSON lines.

    python compile_all.py every cuda:90      all kernels: forms, dtypes, with and without what is optional
    python compile_all.py each cuda:90       all kernels, once
    python compile_all.py standard cuda:90   the kernels of the default model's shapes, as the assembler sees them
    python compile_all.py offsets cuda:90    kernels with 32-bit and with 64-bit offsets, with their TTIR
    python compile_all.py updates cuda:90    kernels of rows within one warp or across several, with their TTGIR
    python compile_all.py facts              what row kernels say of a launch to a profiler; nothing is compiled

The launches are the package's own: they are recorded, not run, so what compiles here is what runs
on a GPU. Triton must be imported without its interpreter, so this is a process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from support.plans import new_plans
from torch import nn
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import JITFunction

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.grouping import group_both_ends_unordered, group_edges_unordered
from anemoi_gt.nn import GraphTransformerMapperBlock, fused_block, sublayers
from anemoi_gt.ops import triton_backend
from anemoi_gt.ops.backends import BACKENDS
from anemoi_gt.ops.tensors import (
    AttentionOperands,
    EdgeAttentionOptions,
    InteractionOptions,
    InteractionTensors,
    Layer,
    Linear,
    Network,
    NetworkOptions,
    NetworkTensors,
    Norm,
    NormOptions,
)
from anemoi_gt.ops.triton_backend.edge_sums import sum_edges
from anemoi_gt.ops.triton_backend.formulas import interaction_sublayer, network_sublayer

WARP = {"cuda": 32, "hip": 64}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Call:
    """One call of edge attention, of which only sizes, dtypes and what is None matter."""

    heads: int
    channels: int
    edge_dim: int
    form: str = "raw"
    dtype: torch.dtype = torch.bfloat16
    dropout_p: float = 0.0
    graph: GraphStructure = None


def bare_graph(edges=400):
    """A sorted graph of 40 sources and 30 destinations; its mean degree chooses tiles."""
    numbers = torch.arange(edges)
    edge_index = torch.stack([numbers * 7 % 40, numbers * 30 // edges])
    return GraphStructure.from_edge_index(edge_index, (40, 30))


def hub_graph(edges=400):
    """Return the same graph with hubs among destinations and sources."""
    hubs = torch.empty(257, 0)
    return replace(bare_graph(edges), dst_hubs=hubs, src_hubs=hubs)


def full_graph(edges):
    """Return the same with all optional fields of a structure; with 90 edges, every destination has three."""
    perm, ids = torch.randperm(edges, dtype=torch.int32), torch.arange(edges)
    return replace(bare_graph(edges), perm=perm, global_edge_id=ids)


def run(call):
    """Forward and backward, with gradients of everything, lse included."""
    graph, (heads, channels) = call.graph, (call.heads, call.channels)

    def draw(*shape):
        return torch.zeros(*shape, dtype=call.dtype, requires_grad=True)

    sides = (graph.num_dst, graph.num_src, graph.num_src)
    query, key, value = (draw(1, nodes, heads, channels) for nodes in sides)
    attr = weight = bias = None
    if call.form == "embedded":
        attr = draw(1, graph.num_edges, heads, channels)
    elif call.form != "none":
        attr = draw(1, graph.num_edges, call.edge_dim)
        weight = draw(heads * channels, call.edge_dim)
        bias = draw(heads * channels) if call.form == "raw" else None
    seed = torch.tensor([1]) if call.dropout_p else None
    operands = AttentionOperands(query, key, value, attr, weight, bias)
    options = EdgeAttentionOptions(0.125, call.dropout_p, replay=False)
    out, lse = triton_backend.attend(operands, graph, seed, options)
    (out.float().sum() + lse.sum()).backward()


def run_block(dtype):
    """Forward and backward of both fused sub-layers of a block with norms of queries and keys, from other sources, and of a linear layer."""
    sizes = {
        "in_channels": 64,
        "hidden_dim": 80,
        "out_channels": 64,
        "num_heads": 4,
        "edge_dim": 3,
        "qk_norm": True,
    }
    block, graph = GraphTransformerMapperBlock(**sizes), bare_graph()
    nodes = tuple(
        torch.zeros(number, 64, dtype=dtype, requires_grad=True)
        for number in (graph.num_src, graph.num_dst)
    )
    call = sublayers.Computation(dtype, dtype != torch.float32, BACKENDS["triton"])
    attention = sublayers.read_attention(block, call)
    norm = ("layer_norm_mlp_dst", block.layer_norm_mlp_dst)
    feed_forward = sublayers.read_network(block.node_dst_mlp, call, "node_dst_mlp", norm_in=norm)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = fused_block.block_forward(
            block,
            fused_block.BlockModules(attention, feed_forward, fused_block.NO_SOURCES),
            nodes,
            graph,
            torch.zeros(graph.num_edges, 3),
            (None, None),
            batch=1,
            attend=lambda: nodes[1],
        )
        layer = sublayers.read_linear(nn.Linear(64, 101), "layer", call)
        fused_block.network(layer, y).float().sum().backward()


def run_networks(dtype, features, graph, *, gated=False):
    """Forward and backward of an edge update from other sources, then of the update of its nodes."""

    def draw(*shape):
        return torch.zeros(*shape, requires_grad=True)

    def network(inputs):
        value = Linear(draw(features, inputs), draw(features))
        layer = Layer(value if gated else Linear(), value)
        norm = Norm(draw(features), draw(features))
        return Network(layer, Layer(), Linear(draw(features, features), draw(features)), norm)

    src, dst, edges = (
        draw(number, features) for number in (graph.num_src, graph.num_dst, graph.num_edges)
    )
    options = NetworkOptions(NormOptions(1e-5), "silu", dtype, torch.float32, residual=True)
    edges = interaction_sublayer(
        InteractionTensors(src, None, dst, edges, network(3 * features)),
        graph,
        InteractionOptions(1, options),
    )
    sums = sum_edges(edges, graph, 1)
    tensors = NetworkTensors(dst, sums, Norm(), network(2 * features))
    network_sublayer(tensors, options).sum().backward()


def record(work):
    """Every (kernel, arguments) that `work` launches; nothing runs on a device."""
    launches = []
    with mock.patch.object(
        JITFunction, "run", lambda kernel, *, grid, warmup, **args: launches.append((kernel, args))
    ):
        work()
    return launches


def argument_type(value):
    """Return Triton's name of the type of a runtime argument."""
    if torch.is_tensor(value):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i64" if abs(value) >= 2**31 else "i32"


def source_of(kernel, args, alignment):
    """Return what Triton compiles for a recorded launch, and its options; `alignment` is of its pointers."""
    signature = {}
    constants = {}
    attributes = {}
    for index, parameter in enumerate(kernel.params):
        value = args[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = argument_type(value)
            if torch.is_tensor(value):
                attributes[(index,)] = alignment
    options = {name: value for name, value in args.items() if name not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return source, options


def compile_launch(kernel, args, target, alignment):
    """Compile a recorded launch, with what is known of the alignment of its pointers."""
    source, options = source_of(kernel, args, alignment)
    return triton.compile(source, target=target, options=options)


def ttir_of(kernel, args, target):
    """Return the TTIR of a recorded launch, an eighth of the work of `triton.compile` (Triton 3.5 to 3.7)."""
    source, options = source_of(kernel, args, ALIGNED)
    backend = make_backend(target)
    options = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def distinct(launches):
    """Launches that differ in what is compiled."""
    seen = {}
    for kernel, args in launches:
        key = (
            kernel.fn.__name__,
            *((n, str(v.dtype) if torch.is_tensor(v) else v) for n, v in sorted(args.items())),
        )
        seen.setdefault(key, (kernel, args))
    return seen.values()


def resources(compiled):
    """Registers, bytes of spilled and of shared memory, as the assembler reports them."""
    if "amdgcn" in compiled.asm:
        listed = dict(re.findall(r"^\s+\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
        return {
            "registers": int(listed["vgpr_count"]),
            "stack": int(listed["private_segment_fixed_size"]),
            "shared": compiled.metadata.shared,
            "local": 4 * int(listed["vgpr_spill_count"]),
        }
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        text = subprocess.run(
            [tool, "-res-usage", binary.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    return dict(
        zip(("registers", "stack", "shared", "local"), map(int, usage.groups()), strict=True)
    )


def recorded(*calls):
    return distinct(
        [launched for call in calls for launched in record(lambda call=call: run(call))]
    )


def every():
    """All kernels: every form, dtype and option, on standard and odd shapes."""
    odd = Call(6, 10, 3, graph=bare_graph())
    standard = Call(16, 64, 11, graph=full_graph(91), dropout_p=0.1)
    calls = [
        odd,
        replace(odd, form="raw_without_bias", dtype=torch.float16),
        replace(odd, dtype=torch.float32),
    ]
    calls += [
        replace(odd, form="embedded", dtype=torch.float32),
        replace(odd, form="none", dtype=torch.float16),
    ]
    calls += [
        standard,
        replace(standard, form="embedded"),
        replace(standard, form="none"),
        replace(odd, channels=500),
    ]
    equal = full_graph(90)
    calls += [
        replace(standard, graph=equal),
        replace(standard, form="none", graph=equal),
        replace(odd, graph=equal),
    ]
    calls += [
        replace(call, graph=hub_graph()) for call in (odd, replace(standard, form="embedded"))
    ]
    launches = list(recorded(*calls))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        launches += distinct(record(lambda dtype=dtype: run_block(dtype)))
    for dtype, features, graph, gated in (
        (torch.float32, 512, bare_graph(), False),
        (torch.float16, 1024, hub_graph(), True),
        (torch.bfloat16, 512, full_graph(91), True),
    ):
        launches += distinct(record(partial(run_networks, dtype, features, graph, gated=gated)))
    for dtype in (torch.int32, torch.int64):
        edges = torch.zeros(2, 7, dtype=dtype)
        launches += record(lambda edges=edges: group_edges_unordered(edges, 3, edges.dtype))
        launches += record(lambda edges=edges: group_both_ends_unordered(edges, 3, 4, torch.int32))
    for kernel, args in launches:
        yield (
            kernel,
            args,
            ALIGNED,
            lambda one: {
                "binaries": sorted({"cubin", "hsaco"} & set(one.asm)),
                "shared": one.metadata.shared,
            },
        )


def each():
    first = {}
    for kernel, *rest in every():
        first.setdefault(kernel, (kernel, *rest))
    yield from first.values()


def standard():
    """The default model's shapes: 16 heads of 64 and 32 channels, 11 attributes, bfloat16; low, high, equal degrees."""
    graphs = (bare_graph(), bare_graph(91), bare_graph(90), hub_graph())
    calls = []
    for channels in (64, 32):
        calls += [Call(16, channels, 11, graph=graph) for graph in graphs]
    for kernel, args in recorded(*calls):
        yield kernel, args, ALIGNED, resources


def offsets(target):
    """Print kernels with narrow and with wide offsets."""
    for wide, int32_limit in ((False, 2**31), (True, 0)):
        calls = [Call(16, 64, 11, form=form, graph=bare_graph()) for form in ("raw", "embedded")]
        calls += [Call(16, 64, 11, graph=graph) for graph in (bare_graph(90), hub_graph())]
        with new_plans(int32_limit=int32_limit):
            launches = recorded(*calls)
        for kernel, args in launches:
            text = ttir_of(kernel, args, target)
            print(json.dumps({"kernel": kernel.fn.__name__, "wide": wide, "ir": text}), flush=True)


def updates():
    """Kernels of rows that a warp holds whole, that it shares with others, and that are not aligned."""
    half, single = torch.bfloat16, torch.float32
    aligned = [(16, 64, half), (4, 256, single), (16, 65, half), (2, 1100, half)]
    for heads, channels, dtype, alignment in [
        *((*case, ALIGNED) for case in aligned),
        (16, 64, half, []),
    ]:
        for kernel, args in recorded(Call(heads, channels, 11, dtype=dtype, graph=hub_graph())):
            walks = kernel.launch_metadata is not None or "hub" in kernel.fn.__name__
            if args["num_warps"] > 1 and walks:
                yield kernel, args, alignment, lambda compiled: {"ir": compiled.asm["ttgir"]}


def facts():
    """Print launch metadata of row kernels: rows of 2 x 4 bfloat16, 400 edges, 30 destinations, 40 sources."""
    for form in ("raw", "embedded"):
        for kernel, args in recorded(Call(2, 4, 3, form=form, graph=bare_graph())):
            if kernel.launch_metadata is not None:
                launched = SimpleNamespace(name=kernel.fn.__name__)
                metadata = kernel.launch_metadata((1,), launched, args)
                print(json.dumps(metadata | {"form": form}))


def main(what, where):
    """Compile the launches named `what` for the target `where`, one JSON line each."""
    backend, _, arch = where.partition(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, WARP[backend])
    # launches are chosen as PyTorch for that GPU would
    torch.version.hip = "6.0" if backend == "hip" else None
    if what == "offsets":
        offsets(target)
        return
    functions = {f.__name__: f for f in (every, each, standard, updates)}
    for kernel, args, alignment, describe in functions[what]():
        compiled = compile_launch(kernel, args, target, alignment)
        line = {"kernel": kernel.fn.__name__, "name": compiled.metadata.name, **describe(compiled)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        facts()
    else:
        main(*sys.argv[1:])
