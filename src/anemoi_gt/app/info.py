"""The output of `anemoi-gt info`: versions, devices, backends, Anemoi. It needs only torch."""

import ast
import inspect
import os
import platform
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

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
    """Yield a one-line summary, then how `install` would compute each block of a checkpoint.

    Raise ValueError if it is not a whole model that the installed anemoi-models can run.
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
    missing = missing_attributes(model)
    if missing:
        raise ValueError(
            f"checkpoint must be of a version like {installed_version}, which sets attributes that "
            f"{path} does not have, so the model cannot run: {', '.join(missing)}; install the "
            "version that wrote it, or build the model and load its state dict"
        )
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


def missing_attributes(model: torch.nn.Module) -> list[str]:
    """Return, as CLASS.NAME, what constructors of Anemoi's modules always set and `model` lacks.

    A pickle holds attributes, not code: one of another version may have other attributes than the
    installed code reads.
    """
    missing = {}
    always_set = {kind: _always_set(kind) for kind in map(type, model.modules())}
    for module in model.modules():
        for name in always_set[type(module)]:
            if not hasattr(module, name):
                missing[f"{type(module).__name__}.{name}"] = True
    return list(missing)


def _always_set(kind: type) -> list[str]:
    """Return the names that the constructors of a class of Anemoi assign unconditionally."""
    names = []
    for owner in kind.__mro__:
        if not owner.__module__.startswith("anemoi.") or "__init__" not in vars(owner):
            continue
        source = inspect.getsource(inspect.unwrap(vars(owner)["__init__"]))
        constructor: Any = ast.parse(textwrap.dedent(source)).body[0]
        for statement in constructor.body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    names.append(target.attr)
    return names


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
