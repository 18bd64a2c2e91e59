"""What a profiler shows of a kernel: a name with dtype, heads, channels and attributes, and the bytes and flops it moves."""

_DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "i32": "i32", "i64": "i64"}


def row_kernel_name(base: str, tensor: str):
    """Make the `repr` of a kernel: `base` with the dtype of argument `tensor` and the sizes it is compiled for."""

    def name(specialization) -> str:
        dtype = _DTYPES.get(str(specialization.signature[tensor]).lstrip("*"), "any")
        sizes = {key.lower(): specialization.constants.get(key) for key in ("H", "C", "D")}
        return "_".join([base, dtype, *(f"{key}{size}" for key, size in sizes.items() if size is not None)])

    return name


def launch_facts(grid, kernel, args) -> dict:
    """Launch metadata: the name, bytes that gathered rows and edge arrays move at least, and the flops on rows."""
    heads, channels = args["H"], args["C"]
    samples = args["query"].shape[0]
    size = args["query"].element_size()
    rows = samples * args["num_edges"] * heads * channels
    nodes = samples * (args["num_dst"] + args["num_src"]) * heads * channels
    return {"name": kernel.name, "bytes": 2 * (rows + nodes) * size, f"flops{8 * size}": 4 * rows}
