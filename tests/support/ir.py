"""Reading Triton's intermediate representation: how wide offsets are, and in which order memory is read and written.

One pass over the lines, in which every value knows the kernel's argument that it points into and
what bounds it. Names are unique where they can be seen and used again elsewhere, so the latest
definition of a name is the one that is meant.
"""

import re
from dataclasses import dataclass

SHAPING = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "ttg.convert_layout"}
# as unbounded as what they are made of
SUMMING = SHAPING | {
    "tt.addptr",
    "arith.addi",
    "arith.subi",
    "arith.muli",
}


@dataclass(frozen=True)
class Value:
    """Known properties of a value."""

    base: str  # the kernel's argument that it comes from, by way of pointer arithmetic
    constant: bool = False
    unbounded: bool = False  # only the sizes of the graph bound it
    narrow: bool = False  # made with a 32-bit product of something unbounded

    @classmethod
    def of(cls, name, operation, operands, line):
        """The value that an operation makes."""
        # the others count heads and channels
        first_axis = operation == "tt.get_program_id" and " x " in line
        # remainders stay below the number of nodes
        unbounded = first_axis or operation in (
            "tt.load",
            "arith.divsi",
        )
        if operation in SUMMING or operation == "arith.extsi":
            unbounded = any(operand.unbounded for operand in operands)
        narrow = operation != "tt.load" and any(operand.narrow for operand in operands)
        if operation == "arith.muli" and re.search(r": (tensor<\d+x(1x)?i32|i32)", line):
            narrow |= unbounded
        base = (
            operands[0].base
            if operands and (operation in SHAPING or operation == "tt.addptr")
            else name.lstrip("%")
        )
        return cls(base, operation == "arith.constant", unbounded, narrow)


def walk(text):
    """(operation, operands, line) for every line that does something, in order."""
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
    """Arguments with an offset that holds a 32-bit product of a number that grows with the graph."""
    added = (operands for operation, operands, _ in walk(ttir) if operation == "tt.addptr")
    return {pointer.base for pointer, offset, *_ in added if offset.narrow}


def unordered_updates(ttgir):
    """Arguments that a loop reads and then overwrites, where several warps read the same and no barrier parts them."""
    layouts, found, read = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M)), set(), set()
    for operation, operands, line in walk(ttgir):
        if operation == "scf.for" or "barrier" in line:
            read = set()
        elif operation == "tt.load" and _shared_by_warps(line, layouts):
            read.add(operands[0].base)
        elif operation == "tt.store":
            found |= {operands[0].base} & read
    return found


def _shared_by_warps(load, layouts):
    """Return whether threads of several warps read the same element."""
    pattern = r": tensor<((?:\d+x)+)!.*?(?:slice<\{dim = (\d), parent = )?(#\w+)[}>]*$"
    tensor = re.search(pattern, load.split(" loc(")[0])
    if tensor is None:
        return True  # a scalar, which every thread reads
    sizes, sliced, layout = (
        [int(size) for size in tensor[1].split("x")[:-1]],
        tensor[2],
        layouts[tensor[3]],
    )
    if not re.search("ttg.blocked|ttg.nvidia_mma", layout):
        return True  # nothing is known of it
    warps, per_warp = _tiling(layout)
    if sliced is not None and warps[int(sliced)] > 1:
        return True
    axes = [axis for axis in range(len(warps)) if str(axis) != sliced]
    return any(
        warps[axis] > 1 and size < warps[axis] * per_warp[axis]
        for axis, size in zip(axes, sizes, strict=True)
    )


def _tiling(layout):
    """How many warps lie along each axis, and how many elements of it a warp holds at a time."""

    def read(name):
        return [int(size) for size in re.search(rf"{name} = \[([\d, ]+)\]", layout)[1].split(",")]

    if "nvidia_mma" in layout:
        # rows and columns, and perhaps the inner size
        return read("warpsPerCTA"), read("instrShape")[:2]
    lanes, numbers = read("threadsPerWarp"), read("sizePerThread")
    return read("warpsPerCTA"), [lane * number for lane, number in zip(lanes, numbers, strict=True)]
