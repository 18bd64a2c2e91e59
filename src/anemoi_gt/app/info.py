"""The output of `anemoi-gt info`: versions, devices, backends, Anemoi. It needs only torch."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import BACKENDS, choose_backend, unsupported_reason
from anemoi_gt.tested_versions import installed, why_untested
from anemoi_gt.toolchain import compile_problem
from anemoi_gt.version import __version__

# module: its package, and the extra that installs it (None for dependencies of the library)
PACKAGES = {
    "torch_geometric": ("torch-geometric", None),
    "filelock": ("filelock", None),
    "triton": ("triton", "triton"),
    "numpy": ("numpy", "graphs"),
    "scipy": ("scipy", "graphs"),
    "hydra": ("hydra-core", "hydra"),
    "einops": ("einops", "train"),
    "tqdm": ("tqdm", "train"),
    "matplotlib": ("matplotlib", "train"),
    "xarray": ("xarray", "xarray"),
    "netCDF4": ("netCDF4", "xarray"),
    "zarr": ("zarr", "xarray"),
    "cf_xarray": ("cf-xarray", "xarray"),
    "eccodes": ("eccodes", "era5"),
    "pooch": ("pooch", "era5"),
}


def describe(checkpoint: str | None = None) -> str:
    """Describe versions, packages, devices, backends per device, and what `install` replaces.

    With a checkpoint of a whole Anemoi model, such as an inference checkpoint, also describe how
    `install` would compute its blocks. The checkpoint is unpickled, which executes its code.
    """
    sections = {
        "versions": versions(),
        "packages": packages(),
        "devices": devices(),
        "attention backends": backends(),
        "torch.compile": compiled_code(),
    }
    sections["anemoi-models"] = anemoi_models()
    if checkpoint is not None:
        sections["checkpoint"] = blocks_of_checkpoint(checkpoint)
    return "\n\n".join("\n".join([name, *_aligned(rows)]) for name, rows in sections.items())


def versions() -> Iterator[tuple[str, str]]:
    """Yield name and version of this package, Python and PyTorch, and whether they are tested."""
    yield "anemoi_gt", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    if torch.version.cuda:
        build = f"for CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"for ROCm {torch.version.hip}"
    else:
        build = "without CUDA"
    yield "torch", f"{torch.__version__}, built {build}"
    yield "tested", why_untested(*installed()) or "yes, these releases of PyTorch and Triton are"


def packages() -> Iterator[tuple[str, str]]:
    """Yield the packages that parts of the library need, with version or install command."""
    for module, (package, extra) in PACKAGES.items():
        if find_spec(module):
            yield package, _version_of(package)
        else:
            requirement = f"anemoi-gt[{extra}]" if extra else "anemoi-gt"
            yield package, f"missing: pip install '{requirement}'"


def devices() -> Iterator[tuple[str, str]]:
    """Yield the devices that PyTorch can use."""
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    for device in _gpus():
        properties = torch.cuda.get_device_properties(device)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"{properties.major}.{properties.minor}"
        yield str(device), f"{properties.name}, {memory}, compute capability {capability}"


def backends() -> Iterator[tuple[str, str]]:
    """Yield, for each device and backend, whether it runs, the reason if not, and auto's choice."""
    for device in (torch.device("cpu"), *_gpus()):
        call: tuple = ({}, Dtypes(torch.float32), device)
        chosen = choose_backend("auto", *call)
        for name, backend in BACKENDS.items():
            reason = unsupported_reason(name, *call)
            status = "runs" if reason is None else f"does not run: {reason}"
            if backend is chosen:
                status += ", chosen by auto"
            yield f"{device} {name}", status


def compiled_code() -> Iterator[tuple[str, str]]:
    """Yield, for each device, whether torch.compile can compile for it, and the reason if not."""
    for device in (torch.device("cpu"), *_gpus()):
        problem = compile_problem(device)
        yield str(device), "runs" if problem is None else f"does not run: {problem}"


def anemoi_models() -> Iterator[tuple[str, str]]:
    """Yield the version of anemoi-models, and whether `install` would replace each part of it."""
    try:
        from anemoi_gt.integrations.anemoi.installation import replacements

        replaced = replacements()
    except (ImportError, OSError) as error:  # OSError: PyTorch cannot make its cache
        yield "version", _version_of("anemoi-models", "missing")
        yield "install", f"not possible: {error}"
        return
    yield "version", _version_of("anemoi-models")
    yield (
        "training steps",
        "replayed from CUDA graphs with InstallCallback in diagnostics.callbacks",
    )
    for name, reason in replaced.items():
        yield name, "replaced by install" if reason is None else f"stays upstream's: {reason}"


def blocks_of_checkpoint(path: str) -> Iterator[tuple[str, str]]:
    """Yield the version that wrote a checkpoint, and how `install` would compute its blocks.

    Raise ValueError if it is not a whole model that the installed anemoi-models can read.
    """
    from anemoi_gt.integrations.anemoi import flash_attn_stand_in, report
    from anemoi_gt.integrations.anemoi.installation import examine

    installed_version = f"the installed anemoi-models {_version_of('anemoi-models')}"
    try:
        with flash_attn_stand_in():
            model = torch.load(path, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"checkpoint must be of a version like {installed_version}, which does not have all "
            f"that {path} refers to: {error}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            "checkpoint must hold a whole model, as Anemoi's inference-*.ckpt does, got "
            f"{type(model).__name__} in {path}"
        )
    written = version_of_writer(path)
    if written is not None:
        # a pickle holds attributes, not code, which may read others
        yield "written by", f"anemoi-models {written}; models run with the version that wrote them"
    blocks = examine(model)
    if not blocks:
        yield "blocks", "none: the model has no block that anemoi_gt computes"
        return
    yield "blocks", report.summary(blocks)
    for block in blocks:
        if block.reason is None:
            yield block.path, block.outcome
        else:
            yield block.path, f"{block.outcome}: {block.reason}"


def version_of_writer(path: str) -> str | None:
    """Return the version of anemoi-models that wrote a checkpoint, None if it does not say."""
    from anemoi.utils.checkpoints import load_metadata

    try:
        provenance = load_metadata(path).get("provenance_training", {})
    except FileNotFoundError:  # no metadata, as in a file of torch.save
        return None
    return provenance.get("module_versions", {}).get("anemoi.models")


def _gpus() -> list[torch.device]:
    if not torch.cuda.is_available():
        return []
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _version_of(package: str, default: str = "version unknown") -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # importable, but not installed as a package
        return default


def _aligned(rows: Iterator[tuple[str, str]]) -> list[str]:
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    return [f"  {name:{width}}  {text}" for name, text in pairs]
