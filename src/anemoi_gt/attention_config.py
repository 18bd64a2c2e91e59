"""AttentionConfig: which kernels compute edge attention, and in which precision.

The config is a value: it is handed down by constructors, never read from the environment or a global.
"""

from dataclasses import dataclass

BACKENDS = ("auto", "triton", "torch")
PRECISIONS = (None, "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class AttentionConfig:
    """How `anemoi_gt.edge_attention` is computed.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        `triton` are the fused GPU kernels, `torch` the PyTorch reference. An explicit choice that cannot run raises
        with the reason; `auto` takes the first backend that can, and logs its choice at DEBUG level.
    precision : {None, "fp32", "bf16", "fp16"}
        The dtype of the rows that are read (query, key, value, edge attributes, weight, bias). None is the dtype that
        arrives: autocast's inside `torch.autocast`, otherwise that of query. With a precision the inputs are cast to it
        and the output is cast back to the dtype of query. Sums and `lse` are float32 in any case.

    Raises
    ------
    ValueError
        For any other backend or precision.

    Examples
    --------
    >>> AttentionConfig(backend="torch", precision="bf16")
    AttentionConfig(backend='torch', precision='bf16')
    """

    backend: str = "auto"
    precision: str | None = None

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.precision not in PRECISIONS:
            names = ", ".join(str(name) for name in PRECISIONS)
            raise ValueError(f"precision must be one of {names}, got {self.precision!r}")


def check_config(config: object) -> None:
    """Raise ValueError unless `config` is an AttentionConfig."""
    if not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig, as AttentionConfig(backend='torch'), got {config!r}")
