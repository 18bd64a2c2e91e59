"""A model with the graph that it was built on, as a program: the usual case. What changes is the number of samples."""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from anemoi_gt.export.program import export_program


class Autocast(nn.Module):
    """A model that computes under autocast wherever it is called.

    Parameters
    ----------
    model : nn.Module
    device_type : str
        Such as "cuda".
    dtype : torch.dtype
        bfloat16 or float16.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.model, self.device_type, self.dtype = model, device_type, dtype

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Call the model."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(x)


def export_model(model: nn.Module, x: Tensor | dict[str, Tensor], max_batch: int) -> ExportedProgram:
    """Export a model on its own graph.

    Parameters
    ----------
    model : EncoderProcessorDecoder, or what is called alike
        It is left as it is. Of what `torch.compile` returned the module inside is exported.
    x : Tensor [B, N, in_channels], or dict of data set to that
        An example, on the device of the model; the numbers in it do not matter.
    max_batch : int
        The program takes 1 to so many samples; 1 fixes their number. On the backend `triton`, kernels count in 32 bits
        where so many samples let them.

    Returns
    -------
    torch.export.ExportedProgram

    Raises
    ------
    ValueError
        When max_batch is no whole number or below 1, or x is no example.
    """
    check_max_batch(max_batch)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    tree_map(_check_example, x)
    samples = Dim("samples", min=1, max=max_batch) if max_batch > 1 else None
    example = tree_map(lambda field: field.narrow(0, 0, 1).repeat(2 if samples else 1, 1, 1), x)  # 1 would fix it at 1
    return export_program(model, (example,), (tree_map(lambda _: {0: samples} if samples else None, x),))


def check_max_batch(max_batch: int) -> None:
    """Raise ValueError unless it is a number of samples."""
    if type(max_batch) is not int or max_batch < 1:
        raise ValueError(f"max_batch must be a whole number of samples, at least 1, got {max_batch!r}")


def _check_example(field: Tensor) -> None:
    if not isinstance(field, Tensor) or field.dim() != 3 or field.shape[0] < 1:
        got = tuple(field.shape) if isinstance(field, Tensor) else type(field).__name__
        raise ValueError(f"x must be an example [B, N, channels] of at least one sample, got {got}")
