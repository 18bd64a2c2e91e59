"""Analysis of Triton's intermediate representation: width of offsets, and order of loads and stores.

One pass over the lines tracks, for every value, the kernel argument that it points into and whether
it is bounded. A name may be used again in another scope, so its latest definition is valid.
"""

import re
from dataclasses import dataclass

SHAPING = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "ttg.convert_layout"}
# the result is unbounded if an operand is
SUMMING = SHAPING | {"tt.addptr", "arith.addi", "arith.subi", "arith.muli"}


@dataclass(frozen=True)
class Value:
    """Known properties of a value."""

    base: str  # the kernel argument that it comes from by pointer arithmetic
    constant: bool = False
    unbounded: bool = False  # bounded only by the sizes of the graph
    narrow: bool = False  # computed with a 32-bit product of an unbounded value

    @classmethod
    def of(cls, name, operation, operands, line):
        """Return the value that an operation computes."""
        # the other axes count heads and channels
        first_axis = operation == "tt.get_program_id" and " x " in line
        # arith.remsi is not among them: a remainder is below the number of nodes
        unbounded = first_axis or operation in ("tt.load", "arith.divsi")
        if operation in SUMMING or operation == "arith.extsi":
            unbounded = any(operand.unbounded for operand in operands)
        narrow = operation != "tt.load" and any(operand.narrow for operand in operands)
        if operation == "arith.muli" and re.search(r": (tensor<\d+x(1x)?i32|i32)", line):
            narrow |= unbounded
        base = name.lstrip("%")
        if operands and (operation in SHAPING or operation == "tt.addptr"):
            base = operands[0].base
        return cls(base, operation == "arith.constant", unbounded, narrow)


def walk(text):
    """Yield (operation, operands, line) for every line with an operation, in order."""
    scope = {}

    def known(name):
        return scope.get(name, Value(name.lstrip("%"), unbounded=True))  # an argument of the kernel

    for line in text.splitlines():
        loop = re.search(r"scf\.for (%[\w]+) = (%[\w]+) to (%[\w]+)", line)
        if loop:
            bounds = [known(name) for name in loop.groups()[1:]]
            scope[loop[1]] = Value(loop[1], unbounded=not all(bound.constant for bound in bounds))
            yield "scf.for", bounds, line
            continue
        match = re.match(r"\s*(?:(%\w+)(?::\d+)? = )?\"?([a-z]\w*\.?\w*)\"?(.*)", line)
        if match:
            name, operation, rest = match.groups()
            operands = [known(operand) for operand in re.findall(r"%\w+", rest)]
            if name:
                scope[name] = Value.of(name, operation, operands, line)
            yield operation, operands, line


def narrow_offsets(ttir):
    """Return the arguments with an offset from a 32-bit product of a value that grows with the graph."""
    added = (operands for operation, operands, _ in walk(ttir) if operation == "tt.addptr")
    return {pointer.base for pointer, offset, *_ in added if offset.narrow}


def unordered_updates(ttgir):
    """Return the arguments that a loop reads in several warps and then overwrites without a barrier between."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    updated = set()
    read = set()
    for operation, operands, line in walk(ttgir):
        if operation == "scf.for" or "barrier" in line:
            read = set()
        elif operation == "tt.load" and _shared_by_warps(line, layouts):
            read.add(operands[0].base)
        elif operation == "tt.store":
            updated |= {operands[0].base} & read
    return updated


def _shared_by_warps(load, layouts):
    """Return whether threads of several warps read the same element."""
    pattern = r": tensor<((?:\d+x)+)!.*?(?:slice<\{dim = (\d), parent = )?(#\w+)[}>]*$"
    tensor = re.search(pattern, load.split(" loc(")[0])
    if tensor is None:
        return True  # a scalar, which every thread reads
    sizes = [int(size) for size in tensor[1].split("x")[:-1]]
    sliced = tensor[2]
    layout = layouts[tensor[3]]
    if not re.search("ttg.blocked|ttg.nvidia_mma", layout):
        return True  # an unknown layout
    warps, per_warp = _tiling(layout)
    if sliced is not None and warps[int(sliced)] > 1:
        return True
    axes = [axis for axis in range(len(warps)) if str(axis) != sliced]
    return any(
        warps[axis] > 1 and size < warps[axis] * per_warp[axis]
        for axis, size in zip(axes, sizes, strict=True)
    )


def _tiling(layout):
    """Return the number of warps along each axis, and the number of elements of one warp."""

    def read(name):
        return [int(size) for size in re.search(rf"{name} = \[([\d, ]+)\]", layout)[1].split(",")]

    if "nvidia_mma" in layout:
        # rows and columns, and perhaps the inner size
        return read("warpsPerCTA"), read("instrShape")[:2]
    lanes, numbers = read("threadsPerWarp"), read("sizePerThread")
    return read("warpsPerCTA"), [lane * number for lane, number in zip(lanes, numbers, strict=True)]
