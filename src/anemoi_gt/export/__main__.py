"""The export application, `python -m anemoi_gt export checkpoint=FILE out=model.pt2`: a package that needs no library of ours.

The config of the run comes from the checkpoint; values on the command line change it.
"""

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.data.datasets import ForecastDataset
from anemoi_gt.evaluate import launch_on_checkpoint
from anemoi_gt.export import Autocast, Trial, export_model, try_package, write_package
from anemoi_gt.export.model import check_max_batch
from anemoi_gt.export.package import check_compiler, check_place, check_toolkit
from anemoi_gt.export.program import check_kernels
from anemoi_gt.hydra_app import Run, build, check_backend, instantiate
from anemoi_gt.training.checkpoint import load_checkpoint, load_weights
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.step import AUTOCAST
from anemoi_gt.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

TRIED = 3  # samples of the batch in which a package is compared


class Wanted(NamedTuple):
    """What the command line asks for.

    Attributes
    ----------
    out : Path
        The package.
    max_batch : int
        Samples that it takes at most.
    precision : str
        One of `AUTOCAST`.
    """

    out: Path
    max_batch: int
    precision: str

    def check(self) -> None:
        """Raise ValueError or OSError for what cannot be."""
        check_max_batch(self.max_batch)
        if self.precision not in AUTOCAST:
            raise ValueError(f"precision must be one of {', '.join(AUTOCAST)}, got {self.precision!r}")
        check_place(self.out)


def prepare(config: "DictConfig") -> Callable[[], None]:
    """Check what is wanted and make the checkpoint's model and data; returns the export."""
    if not isinstance(config.out, str) or not config.out:
        raise ValueError(f"out must be the name of a file, as model.pt2, got {config.out!r}")
    wanted = Wanted(Path(config.out), config.max_batch, config.precision)
    wanted.check()
    checkpoint = Path(config.checkpoint)
    state, run = load_checkpoint(checkpoint), build(config)
    load_weights(run.model, state)
    device = choose_device(run.training.device)
    check_compiler()
    check_toolkit(device)
    made = {"checkpoint": str(checkpoint), "step": str(state.get("step")), "precision": wanted.precision}
    made["backend"] = check_backend(instantiate(config.attention), device)
    if made["backend"] == "triton":
        check_kernels()
    return partial(export, run, wanted, made)


def export(run: Run, wanted: Wanted, made: dict[str, str]) -> Trial:
    """Compile the package and compare it with the model.

    Parameters
    ----------
    run : Run
        From `build`, the model with the weights of the checkpoint.
    wanted : Wanted
        What the command line asks for.
    made : dict of str to str
        Of what and how the package is made, for its metadata.

    Raises
    ------
    FloatingPointError
        When the package gives other numbers than the model; it is not left behind.
    OSError
        When it cannot be written.
    """
    device, dtype, data = choose_device(run.training.device), AUTOCAST[wanted.precision], run.splits.test
    model = run.model.to(device).eval()
    model = model if dtype is None else Autocast(model, device.type, dtype).eval()
    with (
        cpu_threads(run.training.threads),
        TemporaryDirectory(dir=wanted.out.parent, prefix=f".{wanted.out.stem}-") as folder,
    ):
        trial_place = Path(folder) / wanted.out.name
        samples = torch.stack([data[i].inputs for i in range(min(len(data), wanted.max_batch, TRIED))]).to(device)
        log.info("exporting a model of %d weights", sum(parameter.numel() for parameter in model.parameters()))
        program = export_model(model, samples[:1], wanted.max_batch)
        write_package(program, trial_place, made | describe(data, wanted.max_batch, device))
        batches = [samples[:1]] if len(samples) == 1 else [samples[:1], samples]
        trial = try_package(trial_place, model, batches, dtype or torch.float32)
        os.replace(trial_place, wanted.out)
    log.info(
        "same numbers as the model: error %.1e of its output's size, in batches of %s", trial.error, _sizes(batches)
    )
    log.info("one sample takes %.2f ms, the model in eager PyTorch %.2f ms", trial.package_ms, trial.model_ms)
    log.info("written: %s, %.1f MB", wanted.out, trial.size / 1e6)
    return trial


def describe(data: ForecastDataset, max_batch: int, device: torch.device) -> dict[str, str]:
    """Return what a loader has to know of inputs and outputs; what is more than one word is JSON."""
    samples = 1 if max_batch == 1 else f"1 to {max_batch}"
    inputs = {"name": "x", "shape": [samples, len(data.nodes), data.in_channels], "dtype": "float32"}
    inputs |= {"channels": data.input_names, "normalised": "as the data set of the run does"}
    output = {"name": "change", "shape": [samples, len(data.nodes), data.out_channels], "dtype": "float32"}
    output |= {"variables": data.variables, "units": data.units}
    output |= {"mean": data.change_mean.tolist(), "std": data.change_std.tolist()}
    return {
        "anemoi_gt": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "inputs": json.dumps([inputs]),
        "outputs": json.dumps([output]),
        "forecast": "reference + mean + change * std, in units; reference is the state that the data set counts changes from",
        "lead_time_hours": f"{data.lead_time:g}",
    }


def _sizes(batches: list[Tensor]) -> str:
    return " and ".join(str(len(batch)) for batch in batches)


def main() -> None:
    """Run the application with the arguments of the command line."""
    launch_on_checkpoint("export", prepare)


if __name__ == "__main__":
    main()
