"""AttentionConfig: which kernels compute edge attention, in which precision, and how raw edges are sorted.

The config is a value: it is handed down by constructors, never read from the environment or a global.
"""

from dataclasses import dataclass

BACKENDS = ("auto", "triton", "torch")
PRECISIONS = (None, "fp32", "bf16", "fp16")
TILE_FIELDS = {  # of a program of a Triton kernel that gathers rows: the values that may be forced
    "heads": (1, 2, 4, 8, 16, 32, 64, 128),
    "unroll": (1, 2, 3, 4, 6, 8),
    "num_warps": (1, 2, 4, 8, 16),
    "nodes": (1, 2, 4, 8),
    "packed": (0, 1),
    "segment": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
}


@dataclass(frozen=True)
class AttentionConfig:
    """Backend, precision and kernels of `anemoi_gt.edge_attention`.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        `auto` is `triton` (the fused GPU kernels) if it can run, else `torch` (the PyTorch reference). It logs its
        choice at DEBUG level; a named backend that cannot run raises with the reason.
    precision : {None, "fp32", "bf16", "fp16"}
        Dtype in which query, key, value, edge attributes, weight and bias are read. None is the dtype of the inputs:
        autocast's inside `torch.autocast`, otherwise that of query. With a precision, inputs are cast to it and the
        output is cast back to the dtype of query. Sums and `lse` are float32 in any case.
    fixed_degree_kernels : bool
        Use the kernels of backend `triton` for a small fixed in-degree, the same for all destinations. Switch it off to
        find out whether a wrong or slow result comes from them.
    tile : str, optional
        Override fields of the tile of backend `triton`'s row kernels, such as "unroll=1,num_warps=4", to find out
        whether a wrong or slow result comes from the selected tile. `heads` (of a program), `unroll` (edges in
        flight) and `num_warps` are powers of two or small integers; `nodes` (of a program) concerns the kernel over
        sources alone; `packed` is 1 to read 16-bit rows as packed pairs, 0 not to; nodes with more than twice `segment`
        edges are divided among programs (128 in a graph with hubs). A kernel ignores a field that it does not have:
        those for a fixed in-degree have `num_warps` and `packed`. None forces nothing.
    stable_sort : bool
        Sort stably where a call has to build a structure: in a layer that gets a raw `edge_index`, or for a missing
        reverse structure. Results are then bitwise reproducible. False groups edges on a GPU without sorting, for
        graphs that change every step: faster, but sums may differ in the last bit from run to run. It has no effect on
        a CPU, under `torch.use_deterministic_algorithms(True)` and on a GraphStructure.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> AttentionConfig(backend="torch", precision="bf16").precision
    'bf16'
    >>> AttentionConfig(backend="triton", fixed_degree_kernels=False, tile="unroll=1,num_warps=4").tile
    'unroll=1,num_warps=4'
    """

    backend: str = "auto"
    precision: str | None = None
    fixed_degree_kernels: bool = True
    tile: str | None = None
    stable_sort: bool = True

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(map(str, PRECISIONS))}, got {self.precision!r}")
        for name in ("fixed_degree_kernels", "stable_sort"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        parse_tile(self.tile)


def parse_tile(tile: str | None) -> dict[str, int]:
    """Return the forced fields of `AttentionConfig.tile` by name.

    Raise ValueError unless it is None or comma-separated "name=integer" entries of names and values in TILE_FIELDS.

    Examples
    --------
    >>> parse_tile("unroll=1,num_warps=4")
    {'unroll': 1, 'num_warps': 4}
    """
    if tile is None or tile == "":
        return {}
    fields = {}
    for entry in tile.split(",") if isinstance(tile, str) else [tile]:
        name, _, number = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        values = TILE_FIELDS.get(name.strip())
        if values is None or number.strip() not in map(str, values):
            known = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in TILE_FIELDS.items())
            raise ValueError(f"tile must be such as 'unroll=1,num_warps=4' ({known}), got {tile!r}")
        fields[name.strip()] = int(number)
    return fields


def check_config(config: object) -> None:
    """Raise ValueError unless `config` is an AttentionConfig."""
    if not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig, as AttentionConfig(backend='torch'), got {config!r}")
