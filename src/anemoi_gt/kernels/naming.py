"""What a profiler shows of a kernel: a name with dtype, heads, channels and attributes, and the bytes and flops it moves."""

from math import prod

_DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "i32": "i32", "i64": "i64"}


def row_kernel_name(base: str, tensor: str):
    """Make the `repr` of a kernel: `base` with the dtype of argument `tensor` and the sizes it is compiled for."""

    def name(specialization) -> str:
        dtype = _DTYPES.get(str(specialization.signature[tensor]).lstrip("*"), "any")
        sizes = {key.lower(): specialization.constants.get(key) for key in ("H", "C", "D")}
        return "_".join([base, dtype, *(f"{key}{size}" for key, size in sizes.items() if size is not None)])

    return name


def launch_facts(grid, kernel, args) -> dict:
    """Launch metadata: the name, the bytes of all rows [H, C] that are read or written, and the flops on them."""
    size, numbers = args["query"].element_size(), prod(args["query"].shape[:-3]) * args["H"] * args["C"]
    nodes = args["num_src"] if "csr_to_csc" in args else args["num_dst"]  # two rows in or out at each
    edges = args["num_edges"]  # two rows gathered for each, and with embedded features its own beside either
    rows = 2 * (edges * (2 if args.get("EMBEDDED") else 1) + nodes)
    return {"name": kernel.name, "bytes": rows * numbers * size, f"flops{8 * size}": 4 * edges * numbers}
