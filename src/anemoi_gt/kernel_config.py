"""KernelConfig: backend and precision of operations and layers, sorting of raw edges, replays.

The config is a value: it is handed down by constructors, never read from the environment or a
global.
"""

from dataclasses import dataclass

BACKENDS = ("auto", "triton", "torch")
PRECISIONS = (None, "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class KernelConfig:
    """Backend, precision, sorting and replays of `anemoi_gt.edge_attention` and of all layers.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}, or the full name of a backend
        `auto` is `triton` (the fused GPU kernels) if it can run, else `torch` (the PyTorch
        reference), with a warning on a GPU; a named backend that cannot run raises with the reason.
        A name with dots, such as package.module.BACKEND, is a backend of another package
        (`anemoi_gt.ops.backend.Backend`).
    precision : {None, "fp32", "bf16", "fp16"}
        Dtype in which query, key, value, edge attributes, weight and bias are read. None is the
        dtype of the inputs: autocast's inside `torch.autocast`, otherwise the dtype of query. With
        a precision, inputs are cast to it and the output is cast back to the dtype of query. Sums
        and `lse` are float32, or float64 for float64.
    stable_sort : bool
        Sort stably where a call has to build a structure: in a layer that gets a raw `edge_index`,
        or for a missing reverse structure. Results are then bitwise reproducible. False groups
        edges on a GPU without sorting, for graphs that change every step: faster, but sums may
        differ in the last bit from run to run. It has no effect on a CPU, under
        `torch.use_deterministic_algorithms(True)` and on a GraphStructure.
    replay : bool
        Replay the launches of a call from a CUDA graph where its memory was used before, as in a
        steady loop, with the same results: less work for the host. Loops whose memory seldom recurs
        launch as with False. For backend "triton" on NVIDIA GPUs, on the default stream.

    Raises
    ------
    ValueError
        For any other value.

    Examples
    --------
    >>> KernelConfig(backend="torch", precision="bf16").precision
    'bf16'
    """

    backend: str = "auto"
    precision: str | None = None
    stable_sort: bool = True
    replay: bool = True

    def __post_init__(self) -> None:
        is_full_name = isinstance(self.backend, str) and "." in self.backend
        if self.backend not in BACKENDS and not is_full_name:
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}; a backend of "
                "another package has a full name, such as package.module.BACKEND"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(map(str, PRECISIONS))}, got "
                f"{self.precision!r}"
            )
        for name in ("stable_sort", "replay"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")


def check_config(config: object) -> None:
    """Raise ValueError unless `config` is a KernelConfig."""
    if not isinstance(config, KernelConfig):
        raise ValueError(
            f"config must be a KernelConfig, as KernelConfig(backend='torch'), got {config!r}"
        )
