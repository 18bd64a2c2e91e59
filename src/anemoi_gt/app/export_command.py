"""The export application, `anemoi-gt export checkpoint=FILE out=model.pt2`.

It writes a package that runs without this library. The config of the run is read from the
checkpoint and can be overridden on the command line.
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
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.datasets.physical import PhysicalModel
from anemoi_gt.app.objects import Run, build_trained, check_backend, instantiate
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
    """Build the model and data of a checkpoint, and return a function that exports the model."""
    out = Path(str(config.out))
    max_batch = config.max_batch
    precision = config.precision
    check_integer("max_batch", max_batch)
    if precision not in AUTOCAST:
        raise ValueError(f"precision must be one of {', '.join(AUTOCAST)}, got {precision!r}")
    check_path(out)
    run, step = build_trained(config)
    run.splits.test.require_samples()
    run.splits.test.physical_inputs()  # raises before compiling if the data set does not have it
    device = next(run.model.parameters()).device
    check_compiler()
    check_toolkit(device)
    origin = {"checkpoint": str(config.checkpoint), "step": str(step), "precision": precision}
    origin["backend"] = check_backend(instantiate(config.kernels), device)
    if origin["backend"] == "triton":
        check_kernels()
    return partial(export, run, out, max_batch, origin)


def export(run: Run, out: Path, max_batch: int, origin: dict[str, str]) -> PackageReport:
    """Compile the package, compare it with the model, and move it to its final name.

    The run is from `build_trained`; `origin` is metadata: checkpoint, step, precision and backend.
    Raises FloatingPointError if the package does not agree with the model, and OSError if it cannot
    be written; then no file is left.
    """
    device = next(run.model.parameters()).device
    dtype = AUTOCAST[origin["precision"]]
    data = run.splits.test
    network = run.model if dtype is None else Autocast(run.model, device.type, dtype)
    model = PhysicalModel(data.physical_inputs(), network, data.change_mean, data.change_std)
    model = model.to(device).eval()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with (
        cpu_threads(run.training.threads),
        TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as folder,
    ):
        temporary = Path(folder) / out.name
        batch_size = min(len(data), max_batch, VERIFIED_BATCH)
        samples = [data.physical_sample(i) for i in range(batch_size)]
        batch = tuple(torch.stack(inputs).to(device) for inputs in zip(*samples, strict=True))
        first = tuple(inputs[:1] for inputs in batch)
        log.info("exporting a model of %d parameters", num_parameters)
        program = export_model(model, first, max_batch)
        write_package(program, temporary, origin | describe(data, model, max_batch, device))
        # both sizes: PyTorch specialises a size of 1
        batches = [first] if batch_size == 1 else [first, batch]
        with torch.no_grad():
            rounding = model.rounding(model(*batch))
        report = verify_package(
            temporary,
            model,
            batches,
            dtype or torch.float32,
            compared=model.normalised_change,
            rounding=rounding,
        )
        os.replace(temporary, out)  # in the same folder, and so atomic
    sizes = " and ".join(str(len(inputs[0])) for inputs in batches)
    log.info(
        "verified: relative error %.1e from the model, for batch sizes %s", report.error, sizes
    )
    log.info(
        "batch size 1: package %.2f ms, eager PyTorch %.2f ms", report.package_ms, report.model_ms
    )
    log.info("written: %s, %.1f MB", out, report.size / 1e6)
    return report


def describe(
    data: ForecastDataset, model: PhysicalModel, max_batch: int, device: torch.device
) -> dict[str, str]:
    """Return the metadata of inputs, outputs and versions; structured values are JSON."""
    batch = 1 if max_batch == 1 else f"1 to {max_batch}"
    num_nodes = len(data.nodes)
    physical = model.inputs
    inputs = [
        {
            "name": "fields",
            "shape": [batch, num_nodes, len(physical.names)],
            "dtype": "float32",
            "channels": physical.names,
            "units": physical.units,
        }
    ]
    if physical.needs_time:
        time = {
            "name": "time",
            "shape": [batch],
            "dtype": "float64",
            "meaning": "start of the forecast, UTC",
            "units": "seconds since 1970-01-01 00:00:00",
        }
        inputs.append(time)
    output = {
        "name": "forecast",
        "shape": [batch, num_nodes, data.out_channels],
        "dtype": "float32",
        "variables": data.variables,
        "units": data.units,
    }
    normalisation = {}
    for name, tensor in data.normalisation().items():
        if tensor.numel() < num_nodes:
            normalisation[name] = tensor.tolist()

    def coordinates(i: int) -> str:
        return f"{data.nodes.lat[i]:g} N {data.nodes.lon[i]:g} E"

    grid = f"{num_nodes} nodes in the order of the data, from {coordinates(0)} to {coordinates(-1)}"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "anemoi_gt": __version__,
        "torch": torch.__version__,
        "device": device_name,
        "inputs": json.dumps(inputs),
        "outputs": json.dumps([output]),
        "forecast": "physical values in, physical values out; the normalisation is inside",
        "normalisation": json.dumps(normalisation),
        "grid": grid,
        "lead_time_hours": f"{data.lead_time:g}",
    }


def main() -> None:
    """Run the application with the arguments of the command line."""
    hydra_app.run_command_on_checkpoint("export", prepare)
