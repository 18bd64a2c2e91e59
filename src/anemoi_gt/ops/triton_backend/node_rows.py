"""Launches of the kernels of `anemoi_gt.kernels.node_rows`: tensors in and out."""

from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import node_rows
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.triton_backend.launch import KEPT, PROGRAMS
from anemoi_gt.ops.triton_backend.tiles import next_power_of_two

# Elements of a tile, columns of it at most, warps. Measured on an H200 with 528 programs, N = 40,962 and 271,040: the
# gradient of the norm 65 and 376 us, with tiles of 2048 elements 100 and 610.
NORM, NORM_GRADIENT, GELU = (2048, 2**16, 2), (1024, 2**16, 2), (2048, 512, 4)


@lru_cache(KEPT)
def _launch(kernel, num_rows: int, width: int, tile: tuple[int, int, int], programs: int = 0, **more) -> Launch:
    """Return the launch of a kernel; `programs` share the rows, 0 for one tile each. `more` are scalars, constants."""
    elements, columns, num_warps = tile
    features = min(next_power_of_two(width), columns)
    rows = max(1, elements // features)
    grid = (programs or -(-num_rows // rows), -(-width // features))
    scalars = {"num_rows": num_rows} | {name: more.pop(name) for name in ("eps", "first_sum") if name in more}
    constants = {"C": width, "FEATURES": features, "ROWS": rows, "num_warps": num_warps}
    constants["INT64"] = num_rows * width >= 2**31
    return Launch(kernel, grid, scalars, constants | more)


def add_norm(x: Tensor, delta: Tensor | None, norm: tuple[Tensor, Tensor, float], normed: Tensor) -> Tensor:
    """Return x + delta [N, F], x itself without delta, and fill `normed` with its layer norm of weight, bias, eps."""
    weight, bias, eps = norm
    total = None if delta is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    launch = _launch(node_rows.layer_norm_fwd, *x.shape, NORM, eps=eps)
    launch(x=x, delta=delta, weight=weight, bias=bias, total=total, normed=normed)
    return x if total is None else total


def gelu(hidden: Tensor) -> Tensor:
    """Return GELU of `hidden` [N, F]."""
    activated = torch.empty_like(hidden)
    _launch(node_rows.gelu_fwd, *hidden.shape, GELU)(hidden=hidden, activated=activated)
    return activated


class NodeSums:
    """Sums over nodes: each of PROGRAMS, a fixed number, adds to its row of `partial` [PROGRAMS, width], by columns."""

    def __init__(self, like: Tensor, width: int):
        self.partial = like.new_zeros((PROGRAMS, width), dtype=torch.float32)

    def norm_backward(
        self, dx: Tensor, normed: Tensor, x: Tensor, grad_normed: Tensor, grad_total: Tensor | None,
        norm: tuple[Tensor, Tensor, float], columns: slice, biases: bool = False,
    ) -> None:  # fmt: skip
        """Fill dx, and `normed` with the layer norm of x again.

        Gradients of weight and bias are added from the first of `columns` on; with `biases`, grad_total and dx follow.
        """
        weight, bias, eps = norm
        self._launch(node_rows.layer_norm_bwd, x, NORM_GRADIENT, columns, BIASES=biases, eps=eps)(
            x=x, grad_normed=grad_normed, grad_total=grad_total, weight=weight, bias=bias, dx=dx, normed=normed,
            partial=self.partial,
        )  # fmt: skip

    def gelu_backward(self, hidden: Tensor, grad: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return GELU of `hidden` [N, F] again, and the gradient of `hidden`, which is added."""
        activated, dh = torch.empty_like(hidden), torch.empty_like(hidden)
        launch = self._launch(node_rows.gelu_bwd, hidden, GELU, columns)
        launch(hidden=hidden, grad_activated=grad, activated=activated, grad_hidden=dh, partial=self.partial)
        return activated, dh

    def _launch(self, kernel, rows: Tensor, tile: tuple[int, int, int], columns: slice, **options) -> Launch:
        options |= {"SUMS": self.partial.shape[1], "first_sum": columns.start}
        return _launch(kernel, *rows.shape, tile, PROGRAMS, **options)
