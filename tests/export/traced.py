"""Export models for a GPU that need not exist, and print the kernels in their graphs as JSON lines.

    python traced.py kernels     every kernel of a model and of a tensor-graph layer, compiled for an H200
    python traced.py eager       kernels of a program with fixed sizes and of the same eager call

Tensors are fake: they have a device and no memory. AOTInductor traces an exported program again and
then sees the kernels of an operator; so does this script. Triton must be imported without its
interpreter, so this is a process of its own, whose path has the tests' `kernels`.
"""

import json
import sys

import torch
import triton
from compile_all import (
    ALIGNED,
    Call,
    bare_graph,
    compile_launch,
    full_graph,
    hub_graph,
    record,
    run,
)
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget

from anemoi_gt import EncoderProcessorDecoder, GraphTransformerConv, KernelConfig
from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.export import TensorGraphLayer, export_model, export_program
from anemoi_gt.ops import triton_backend
from anemoi_gt.ops.tensors import AttentionOperands, EdgeAttentionOptions

H200 = GPUTarget("cuda", 90, 32)
TRITON = KernelConfig(backend="triton")


class Driver:
    """The target of compilation: PyTorch compiles a kernel to find out which arguments it writes."""

    def get_current_target(self):
        return H200

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Gpu:
    """Fake tensors on a GPU."""

    def __init__(self):
        self.mode = FakeTensorMode(shape_env=ShapeEnv())

    def tensor(self, like, **changes):
        with self.mode:
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device="cuda", **changes
            )

    def module(self, module):
        """Replace the tensors of a module by fake ones."""
        moved = {}  # one per tensor
        for part in module.modules():
            for kind in (part._parameters, part._buffers):
                for name, tensor in kind.items():
                    if tensor is not None:
                        fake = moved.setdefault(tensor, self.tensor(tensor))
                        kind[name] = (
                            nn.Parameter(fake, requires_grad=False)
                            if kind is part._parameters
                            else fake
                        )
        return module


def look_into(program):
    """Return operator names and kernels of the graph that AOTInductor makes of a program."""
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        graph, _ = aot_export_module(program.graph_module, inputs, trace_joint=False)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    kernels = [node for node in calls if "triton_kernel_wrapper" in str(node.target)]
    return {str(node.target) for node in calls}, [read_kernel(node) for node in kernels]


def read_kernel(node):
    """Return (kernel, arguments and options, names of written arguments, whether its grid is symbolic)."""
    tuned, kwargs = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]), node.kwargs["kwargs"]
    args = {
        name: value.meta["val"] if isinstance(value, torch.fx.Node) else value
        for name, value in kwargs.items()
    }
    args |= kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
    options = tuned.configs[0]
    args |= {"num_warps": options.num_warps, "num_stages": options.num_stages}
    symbolic = any(isinstance(size, torch.fx.Node) for size in node.kwargs["grid"][0])
    return tuned.fn, args, sorted(node.kwargs["tensors_to_clone"]), symbolic


def number(value):
    """Return a size as an integer, a symbolic one by its hint."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


def model_program(gpu):
    """A small default model with batch sizes 1 to 64."""
    graph = icosphere_graph(grid("O4"), refinement=1)
    model = gpu.module(
        EncoderProcessorDecoder(graph, 4, 3, channels=32, heads=2, num_layers=1, config=TRITON)
    )
    return export_model(model, gpu.tensor(torch.empty(1, graph["data"].num_nodes, 4)), max_batch=64)


def layer_program(gpu):
    """A tensor-graph layer with dynamic batch, sources, destinations and edges."""
    layer = gpu.module(
        TensorGraphLayer(GraphTransformerConv((4, 5), 16, heads=2, edge_dim=3, config=TRITON))
    )
    batch, sources, nodes, edges = (
        Dim(name) for name in ("batch", "sources", "destinations", "edges")
    )
    structure = {
        "colptr": torch.empty(8, dtype=torch.int32),
        "row": torch.empty(40, dtype=torch.int32),
    }
    structure |= {"sources": torch.empty(9, 0), "perm": torch.empty(40, dtype=torch.int32)}
    x = (torch.empty(2, 9, 4), torch.empty(2, 7, 5))
    inputs = torch.utils._pytree.tree_map(gpu.tensor, (x, structure, torch.empty(40, 3)))
    sizes = {
        "colptr": {0: nodes + 1},
        "row": {0: edges},
        "sources": {0: sources},
        "perm": {0: edges},
    }
    return export_program(
        layer, inputs, (({0: batch, 1: sources}, {0: batch, 1: nodes}), sizes, {0: edges})
    )


def kernels():
    """Print the library's operators and the compiled kernels of programs."""
    for name, make in (("model", model_program), ("layer", layer_program)):
        operators, launches = look_into(make(Gpu()))
        ours = [target for target in operators if NAMESPACE in target]
        print(json.dumps({"program": name, "ours": ours}))
        for kernel, args, written, symbolic in launches:
            numbers = {key: number(value) for key, value in args.items()}
            compiled = compile_launch(kernel, numbers, H200, ALIGNED)
            line = {
                "program": name,
                "kernel": kernel.fn.__name__,
                "written": written,
                "symbolic": symbolic,
                "wide": args["INT64"],
                "cubin": len(compiled.asm["cubin"]),
            }
            print(json.dumps(line))


class Attention(nn.Module):
    """The attention operator on the operands of a call."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, query, key, value, attr, weight, bias, structure):
        graph = type(self.call.graph).from_state(structure)
        operands = AttentionOperands(query, key, value, attr, weight, bias)
        options = EdgeAttentionOptions(0.125, 0.0, replay=False)
        return triton_backend.attend(operands, graph, None, options)


def eager():
    """Print the compile-time arguments of exported and of eagerly launched kernels."""
    odd = Call(6, 10, 3, form="embedded", dtype=torch.float32, graph=bare_graph())
    for call in (
        odd,
        Call(16, 64, 11, graph=hub_graph()),
        Call(16, 64, 11, form="raw", graph=full_graph(91)),
    ):
        launches = record(lambda call=call: run(call))
        # forward
        launched = {
            kernel.fn.__name__: compiled_in(kernel, args) for kernel, args in reversed(launches)
        }
        gpu, attention = Gpu(), Attention(call)
        operands = [
            None if operand is None else gpu.tensor(operand.detach())
            for operand in operands_of(call)
        ]
        structure = {name: gpu.tensor(tensor) for name, tensor in call.graph.state_dict().items()}
        _, exported_launches = look_into(export_program(attention, (*operands, structure)))
        for kernel, args, _, _ in exported_launches:
            name = kernel.fn.__name__
            exported = compiled_in(kernel, args)
            eager = {"num_stages": 3} | launched[name]  # Triton's default
            print(json.dumps({"kernel": name, "exported": exported, "eager": eager}))


def operands_of(call):
    """Return the operands of an inference call, on the CPU."""
    heads, channels, graph = call.heads, call.channels, call.graph
    rows = [
        torch.empty(1, n, heads, channels, dtype=call.dtype)
        for n in (graph.num_dst, graph.num_src, graph.num_src)
    ]
    if call.form == "embedded":
        return *rows, torch.empty(1, graph.num_edges, heads, channels, dtype=call.dtype), None, None
    edges = (
        (1, graph.num_edges, call.edge_dim),
        (heads * channels, call.edge_dim),
        (heads * channels,),
    )
    return *rows, *(torch.empty(*shape, dtype=call.dtype) for shape in edges)


def compiled_in(kernel, args):
    values = {
        name: str(value.dtype) if torch.is_tensor(value) else value for name, value in args.items()
    }
    return {name: value for name, value in values.items() if name not in ("seed", "grid", "warmup")}


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    {"kernels": kernels, "eager": eager}[sys.argv[1]]()
