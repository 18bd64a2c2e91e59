"""Launch the kernels of edge attention with a stand-in driver, and print its arguments as JSON lines.

Triton binds, compiles for sm_90 and launches as usual; the driver records launches and runs nothing.
The second run of a plan uses the kernels that the first has compiled.

    python relaunch.py repeated      launches of two runs, arguments in order
    python relaunch.py public        the same where Triton does not have the private parts that a repeated launch uses
    python relaunch.py empty         launches of four runs over a graph without destinations
    python relaunch.py sizes         how often each kernel is compiled for graphs of several sizes
    python relaunch.py unaligned     launches with operands at odd addresses, when aligned ones were compiled before
    python relaunch.py watched       names of the launches of the second run, and metadata that a launch hook gets
"""

import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from compile_all import Call, bare_graph, hub_graph, run
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernels import backward, edge_projection, forward
from anemoi_gt.kernels import launch as launch_module
from anemoi_gt.ops.triton_backend import plan

KERNELS = [
    kernel for module in (edge_projection, forward, backward) for kernel in vars(module).values()
]
KERNELS = [
    kernel
    for kernel in KERNELS
    if isinstance(kernel, JITFunction) and "num_warps" not in kernel.arg_names
]
SMALL = Call(2, 16, 3, graph=bare_graph(100))
HUBS = Call(2, 16, 3, graph=hub_graph())


class Driver:
    """A driver of Triton for one GPU that records launches."""

    utils = SimpleNamespace(load_binary=lambda *_: (object(), 1, 0, 0, 1024))
    utils.get_device_properties = lambda _: {"max_shared_mem": 2**17}
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 7)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    def __init__(self):
        self.launches = []

    def launcher_cls(self, source, metadata):
        """Launcher that Triton calls for one compiled kernel."""

        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *args):
            if enter is not None:
                enter(launch_metadata)
            self.launches.append((metadata.name, [x, y, z, stream, function, *packed], list(args)))

        return launch


DRIVER = Driver()


def plain(arguments):
    """Return the arguments with the address of each tensor, and 0 for None."""
    return [
        argument.data_ptr() if torch.is_tensor(argument) else argument or 0
        for argument in arguments
    ]


def repeated():
    """Launches of two runs over two graphs, addresses numbered as a run meets them, and the tensors that each took."""
    kept = []

    def noted(make):
        def make_and_keep(*arguments, **options):
            kept.append(make(*arguments, **options))  # so that no address comes twice
            return kept[-1]

        return make_and_keep

    makers = [(torch.Tensor, name) for name in ("new_empty", "contiguous")]
    makers += [
        (torch, name)
        for name in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones_like")
    ]
    lines = []
    with ExitStack() as stack:
        for owner, name in makers:
            stack.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name))))
        for _ in range(2):
            run(SMALL)
            run(HUBS)
            numbers = {}
            launches = []
            tensors = []
            for name, launch, arguments in DRIVER.launches:
                numbered = []
                for argument in plain(arguments):
                    is_address = isinstance(argument, int) and argument > 2**32
                    numbered.append(
                        numbers.setdefault(argument, len(numbers)) if is_address else argument
                    )
                launches.append([name, launch, numbered])
                tensors.append(sum(map(torch.is_tensor, arguments)))
            kept += DRIVER.launches  # with their tensors
            DRIVER.launches.clear()
            lines.append({"launches": launches, "tensors": tensors})
    for line in lines:
        print(json.dumps(line))


def public():
    with (
        mock.patch.object(launch_module, "fast_launch_device", return_value=None),
        mock.patch.object(plan, "fast_launch_device", return_value=None),
    ):
        repeated()


def empty():
    """Names of the launches of four runs over a graph without destinations and edges."""
    graph = GraphStructure.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), (5, 0))
    for _ in range(4):
        run(Call(2, 16, 3, graph=graph))
    for name, *_ in DRIVER.launches:
        print(json.dumps({"name": name}))


def sizes():
    """Sizes that are 1, divisible by 16, and neither, at a mean degree that chooses the same tiles."""
    for nodes in (1, 16, 23):
        numbers = torch.arange(nodes * 5)
        graph = GraphStructure.from_edge_index(torch.stack([numbers % nodes, numbers // 5]), nodes)
        run(Call(2, 16, 3, graph=graph))
    caches = {kernel.__name__: kernel.device_caches[0][0] for kernel in KERNELS}
    print(json.dumps({name: len(compiled) for name, compiled in caches.items() if compiled}))


def unaligned():
    """Operands two numbers, 32 bits, behind an aligned address."""
    run(SMALL)
    DRIVER.launches.clear()
    make = torch.zeros

    def odd(*shape, dtype, requires_grad):
        rows = make(torch.Size(shape).numel() + 2, dtype=dtype)[2:].view(shape)
        return rows.requires_grad_(requires_grad)

    for _ in range(2):
        with mock.patch.object(torch, "zeros", odd):
            run(SMALL)
        for name, _, args in DRIVER.launches:
            tensors = [argument for argument in args if torch.is_tensor(argument)]
            num_odd = sum(tensor.data_ptr() % 16 > 0 for tensor in tensors)
            print(json.dumps({"name": name, "repeated": not tensors, "odd": num_odd}))
        DRIVER.launches.clear()


def watched():
    """Print the names of launches, then names and bytes from a hook, installed after all kernels are compiled."""
    run(SMALL)
    DRIVER.launches.clear()
    records = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: records.append(metadata.get()))
    run(SMALL)
    print(json.dumps([name for name, *_ in DRIVER.launches]))
    for record in records:
        print(json.dumps({name: record[name] for name in ("name", "bytes") if name in record}))


if __name__ == "__main__":
    driver.set_active(DRIVER)
    {f.__name__: f for f in (repeated, public, empty, sizes, unaligned, watched)}[sys.argv[1]]()
