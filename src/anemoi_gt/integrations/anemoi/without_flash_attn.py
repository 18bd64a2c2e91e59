"""A stand-in for flash-attn: models that name it are read and computed without it.

A pickled model of anemoi-models names a function of flash-attn, and a class if its embeddings are
rotary. In `with flash_attn_stand_in()` these names exist, and compute with `window_attention`:

    flash_attn, flash_attn.flash_attn_interface    flash_attn_func of flash-attn 2
    flash_attn.layers.rotary                       RotaryEmbedding
    flash_attn_interface                           flash_attn_func of flash-attn 3
    flash_attn.cute, flash_attn.cute.interface     flash_attn_func of flash-attn 4

A model that has them is pickled by the same names, so it can be read with flash-attn, too.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.integrations.anemoi.window_attention import (
    Scores,
    Window,
    info_once,
    window_attention,
)
from anemoi_gt.ops.dtypes import autocast_dtype

VERSION = "2.8.3"  # of flash-attn, whose functions are followed


class _Named:
    """A function or class that stands in for one of flash-attn, by whose name it is pickled."""

    def __init__(self, name: str, function: Callable):
        self.name = name
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return resolve_name, (self.name,)

    def __deepcopy__(self, memo: dict) -> "_Named":
        return self

    def __repr__(self) -> str:
        return f"<stand-in of anemoi_gt for {self.name}>"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002  as in flash-attn
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention [B, N, H, C] of q [B, N, H, C] to k and v [B, M, H, C]."""
    window = Window(*[None if size < 0 else size for size in window_size])
    if causal:
        window = Window(window.left, 0)
    heads = q.shape[2]
    if alibi_slopes is not None and alibi_slopes.shape not in ((heads,), (q.shape[0], heads)):
        raise ValueError(
            f"alibi_slopes must be [{heads}] or [{q.shape[0]}, {heads}], one per head, got "
            f"{list(alibi_slopes.shape)}"
        )
    dtype = autocast_dtype(q)
    query, key, value = (operand.to(dtype).transpose(1, 2) for operand in (q, k, v))
    scores = Scores(softmax_scale, dropout_p, softcap or 0.0, alibi_slopes)
    return window_attention(query, key, value, window, scores).transpose(1, 2)


def _with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Return the attention as flash-attn 3 and 4 do, whose second value Anemoi does not read."""
    return flash_attn_func(*args, **kwargs), None


class RotaryEmbedding(nn.Module):
    """Rotation of the first `dim` channels by angles that grow with the position of a row.

        theta_nk = n 10000^(-2 k / dim)        position n, channels k and k + dim / 2

    As in flash-attn with its defaults; anemoi-models sets no other option.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(
        self, qkv: Tensor, kv: Tensor, max_seqlen: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return queries [B, N, H, C] and keys with values [B, M, 2, H, C]: all but values rotated.

        `max_seqlen` is the number of rows, which are counted here.
        """
        key, value = kv.unbind(2)
        return self._rotate(qkv), torch.stack((self._rotate(key), value), dim=2)

    def _rotate(self, rows: Tensor) -> Tensor:
        """Return rows [B, N, H, C] rotated, computed in float32 at least."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        k = torch.arange(self.dim // 2, device=rows.device, dtype=dtype)
        n = torch.arange(rows.shape[1], device=rows.device, dtype=dtype)
        theta = n[:, None, None] * 10000 ** (-2 * k / self.dim)  # [N, 1, dim / 2]
        cos, sin = theta.cos(), theta.sin()
        x, y = rows[..., : self.dim].chunk(2, dim=-1)
        turned = torch.cat((x * cos - y * sin, x * sin + y * cos), dim=-1)
        return torch.cat((turned.to(rows.dtype), rows[..., self.dim :]), dim=-1)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return operator.call, (ROTARY, self.dim)


FUNCTION = _Named("flash_attn:flash_attn_func", flash_attn_func)
ROTARY = _Named("flash_attn.layers.rotary:RotaryEmbedding", RotaryEmbedding)
FLASH_ATTN_2: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, "flash_attn_func": FUNCTION},
    "flash_attn.flash_attn_interface": {"flash_attn_func": FUNCTION},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"RotaryEmbedding": RotaryEmbedding},
}
NEWER: dict[str, dict[str, Any]] = {
    name: {"flash_attn_func": _Named(f"{name}:flash_attn_func", _with_lse)}
    for name in ("flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface")
}


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Let pickled models be read that name flash-attn, where it cannot be imported.

    In the `with` statement, functions of anemoi_gt have the names of those of flash-attn that
    anemoi-models calls. A model that was read keeps them: it computes the same, with PyTorch only.
    Nothing changes where flash-attn, of any version, can be imported. The first use is logged.

    Examples
    --------
    >>> with flash_attn_stand_in():  # as torch.load(path, weights_only=False) does, by name
    ...     from flash_attn import flash_attn_func
    >>> flash_attn_func
    <stand-in of anemoi_gt for flash_attn:flash_attn_func>
    """
    if flash_attn_imports():
        yield
    else:
        with _importing(FLASH_ATTN_2 | NEWER):
            yield


@contextmanager
def flash_attn_2_stand_in() -> Iterator[None]:
    """Let flash-attn 2 be imported, which has every option of Anemoi, and none newer."""
    with _importing(FLASH_ATTN_2 | dict.fromkeys(NEWER)):
        yield


def flash_attn_imports() -> bool:
    """Return whether a version of flash-attn can be imported; the stand-in is none."""
    for name in ("flash_attn", "flash_attn_interface"):
        if isinstance(sys.modules.get(name), _StandIn):
            continue
        try:
            import_module(name)
        except ImportError:  # missing, or built for another PyTorch
            continue
        return True
    return False


def is_stand_in(function: object) -> bool:
    """Return whether a function stands in for one of flash-attn."""
    return isinstance(function, _Named)


class _StandIn(ModuleType):
    """A module in the place of one that is missing; the first use of a name is logged."""

    def __init__(self, name: str, names: dict[str, Any]):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)  # find_spec raises without
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        info_once("flash-attn cannot be imported: functions of anemoi_gt stand in for it")
        return self._names[name]


@contextmanager
def _importing(modules: Mapping[str, dict[str, Any] | None]) -> Iterator[None]:
    """Let modules be imported that hold these names; those with None cannot be imported."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, names in modules.items():
        if names is None:
            sys.modules[name] = None  # type: ignore[assignment]  # as Python documents it
            continue
        sys.modules[name] = _StandIn(name, names)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
