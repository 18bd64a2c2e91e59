"""The export application, `anemoi-gt export checkpoint=FILE out=model.pt2`.

It writes a package that runs without this library. The config of the run is read from the checkpoint and can be
overridden on the command line.
"""

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from anemoi_gt.app import hydra_app
from anemoi_gt.app.data.forecast_dataset import ForecastDataset
from anemoi_gt.app.training.config import cpu_threads
from anemoi_gt.app.training.step import AUTOCAST
from anemoi_gt.export import Autocast, PackageReport, export_model, verify_package, write_package
from anemoi_gt.export.package import check_compiler, check_path, check_toolkit
from anemoi_gt.export.program import check_kernels
from anemoi_gt.option_checks import check_integer
from anemoi_gt.version import __version__

log = logging.getLogger(__name__)

VERIFIED_BATCH = 3  # batch size at which a package is compared with the model


def prepare(config: "hydra_app.DictConfig") -> Callable[[], PackageReport]:
    """Check the options, build the checkpoint's model and data, and return the export as a function."""
    if not isinstance(config.out, str) or not config.out:
        raise ValueError(f"out must be a file name, such as model.pt2, got {config.out!r}")
    out, max_batch, precision = Path(config.out), config.max_batch, config.precision
    check_integer("max_batch", max_batch)
    if precision not in AUTOCAST:
        raise ValueError(f"precision must be one of {', '.join(AUTOCAST)}, got {precision!r}")
    check_path(out)
    run, step = hydra_app.build_trained(config)
    run.splits.test.require_samples()
    device = next(run.model.parameters()).device
    check_compiler()
    check_toolkit(device)
    origin = {"checkpoint": str(config.checkpoint), "step": str(step), "precision": precision}
    origin["backend"] = hydra_app.check_backend(hydra_app.instantiate(config.attention), device)
    if origin["backend"] == "triton":
        check_kernels()
    return partial(export, run, out, max_batch, origin)


def export(run: hydra_app.Run, out: Path, max_batch: int, origin: dict[str, str]) -> PackageReport:
    """Compile the package, compare it with the model, and move it to its final name.

    The run is from `build_trained`; `origin` is metadata on checkpoint, step, precision and backend. Raises
    FloatingPointError if the package does not agree with the model, OSError if it cannot be written; no file is left.
    """
    device, dtype, data = next(run.model.parameters()).device, AUTOCAST[origin["precision"]], run.splits.test
    model = run.model if dtype is None else Autocast(run.model, device.type, dtype).eval()
    with cpu_threads(run.training.threads), TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as folder:
        temporary = Path(folder) / out.name
        batch_size = min(len(data), max_batch, VERIFIED_BATCH)
        batch = torch.stack([data[i].inputs for i in range(batch_size)]).to(device)
        log.info("exporting a model of %d parameters", sum(parameter.numel() for parameter in model.parameters()))
        program = export_model(model, batch[:1], max_batch)
        write_package(program, temporary, origin | describe(data, max_batch, device))
        batches = [batch[:1]] if batch_size == 1 else [batch[:1], batch]
        report = verify_package(temporary, model, batches, dtype or torch.float32)
        os.replace(temporary, out)
    sizes = " and ".join(str(len(batch)) for batch in batches)
    log.info("verified: relative error %.1e from the model, for batch sizes %s", report.error, sizes)
    log.info("batch size 1: package %.2f ms, eager PyTorch %.2f ms", report.package_ms, report.model_ms)
    log.info("written: %s, %.1f MB", out, report.size / 1e6)
    return report


def describe(data: ForecastDataset, max_batch: int, device: torch.device) -> dict[str, str]:
    """Return the metadata on inputs, outputs and versions; structured values are JSON."""
    batch = 1 if max_batch == 1 else f"1 to {max_batch}"
    inputs = {"name": "x", "shape": [batch, len(data.nodes), data.in_channels], "dtype": "float32"}
    inputs |= {"channels": data.input_names, "normalised": "by the data set of the run"}
    output = {"name": "change", "shape": [batch, len(data.nodes), data.out_channels], "dtype": "float32"}
    output |= {"variables": data.variables, "units": data.units}
    output |= {"mean": data.change_mean.tolist(), "std": data.change_std.tolist()}
    return {
        "anemoi_gt": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "inputs": json.dumps([inputs]),
        "outputs": json.dumps([output]),
        "forecast": "reference + mean + change * std, in units; reference is the data set's reference state",
        "lead_time_hours": f"{data.lead_time:g}",
    }


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.launch_on_checkpoint("export", prepare)
