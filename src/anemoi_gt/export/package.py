"""Packages: programs that AOTInductor compiles into a single file, for Python or C++."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.export import ExportedProgram
from torch.utils import cpp_extension
from torch.utils.benchmark import Timer

SUFFIX = ".pt2"
PROBE = "#include <locale>\nstd::locale probe() { return std::locale(); }\n"
# a string in every binary that contains a copy of libstdc++'s locale
LOCALE_MARK = b"_S_create_c_locale name not valid"
# maximum relative error: about 80, 4 and 5 eps
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
MIN_RUN_TIME = 0.1  # s, for timing a package and its model


def write_package(program: ExportedProgram, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Compile a program for the device of its tensors and write the package.

    It reads its inputs by raw pointers. With the environment variable AOTI_RUNTIME_CHECK_INPUTS=1,
    PyTorch compares their dtypes, sizes, strides and devices with the program in every call.

    Parameters
    ----------
    program : ExportedProgram
        A program returned by `export_program` or `export_model`.
    path : str or Path
        The file, ending in ".pt2", in an existing folder.
    metadata : dict of str to str
        Stored in the package, for the programs that load it.

    Raises
    ------
    ValueError
        Before compilation, if the name does not end in ".pt2", metadata is not text, or there is no
        C++ compiler that produces loadable packages.
    OSError
        If the folder is not writable.
    """
    check_path(Path(path))
    texts = [*metadata.keys(), *metadata.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"metadata must map str to str (use JSON for other values), got {dict(metadata)}"
        )
    check_compiler()
    options: dict[str, object] = {"aot_inductor.metadata": dict(metadata)}
    if hasattr(config, "_use_fp64_for_unbacked_floats"):
        options["_use_fp64_for_unbacked_floats"] = False  # float32 scalars, as in eager launches
    if hasattr(config.aot_inductor, "check_lowerbound"):
        # a dynamic size was at least 2 in the example; the package also takes 1
        options["aot_inductor.check_lowerbound"] = False
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=options
        )


def check_path(path: Path) -> None:
    """Raise ValueError unless `path` can name a package, OSError if its folder is not writable."""
    if path.suffix != SUFFIX:
        raise ValueError(
            f"the name of a package must end in {SUFFIX}, which PyTorch's loader requires, got "
            f"{path}"
        )
    if path.is_dir():
        raise ValueError(f"a package must be a file, {path} is a folder")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror}") from error


def check_compiler() -> None:
    """Raise ValueError if there is no C++ compiler, or its packages would crash on loading.

    A package with its own copy of the C++ standard library crashes in `std::regex` on loading,
    because the copy gets a locale that belongs to PyTorch's library. Compilers link such a copy if
    `libstdc++.so` is missing.
    """
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "a package needs a C++ compiler, found none: install g++, or set CXX"
        ) from error
    if sys.platform == "linux" and _copies_standard_library(compiler):
        raise ValueError(
            f"a package must share the C++ standard library with PyTorch, but {compiler} links a "
            "copy, which crashes on loading: install its libstdc++.so (libstdc++-13-dev for g++ "
            "13), or set CXX to another compiler"
        )


def check_toolkit(device: torch.device) -> None:
    """Raise ValueError if a package for `device` needs the CUDA toolkit but there is none."""
    if device.type == "cuda" and torch.version.cuda and cpp_extension.CUDA_HOME is None:
        raise ValueError(
            "a package for a GPU needs the CUDA toolkit, found none: install it, or set CUDA_HOME"
        )


def _copies_standard_library(compiler: str) -> bool:
    """Return whether libraries that this compiler links contain a copy of the C++ locale.

    A C compiler driver, which is harmless, links none.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        result = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ValueError(
                f"a package needs a C++ compiler, {compiler} fails: {result.stderr.strip()}"
            )
        return LOCALE_MARK in library.read_bytes()


@dataclass(frozen=True)
class PackageReport:
    """Error, size in bytes and speed of a package, compared with its model.

    `error` is the RMS difference from the model relative to the RMS of the model's output; it is
    the maximum over all batches. `package_ms` and `model_ms` are median times per call with the
    first batch, in milliseconds; the model runs in eager PyTorch.
    """

    error: float
    size: int
    package_ms: float
    model_ms: float


def verify_package(
    path: str | Path,
    model: nn.Module,
    batches: list[Tensor] | list[tuple[Tensor, ...]],
    dtype: torch.dtype,
    *,
    compared: Callable[..., Tensor] | None = None,
    rounding: float = 0.0,
) -> PackageReport:
    """Compare a package with its model on the same inputs.

    Raises FloatingPointError if the error exceeds the limit of `dtype`.

    Parameters
    ----------
    model : nn.Module
        The exported model in evaluation mode, on the device of the package.
    batches : list of Tensor [B, N, in_channels], or of tuples of Tensor
        Inputs on that device; the first is timed. A tuple holds several arguments.
    dtype : torch.dtype
        Compute dtype of the model, a key of `LIMITS`. It determines the allowed error.
    compared : callable, optional
        Called as `compared(output, *batch)`; its results are compared instead of the outputs. Use
        it if the output is the sum of a large state and a small change.
    rounding : float
        Added to the allowed error, for the float32 rounding of the comparison.
    """
    package = torch._inductor.aoti_load_package(str(path))
    allowed = LIMITS[dtype] + rounding
    error = 0.0
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    with torch.no_grad():
        for batch in batches:
            output = package(*batch)
            expected = model(*batch)
            if compared is not None:
                output = compared(output, *batch)
                expected = compared(expected, *batch)
            batch_error = relative_error(output, expected)
            if not batch_error <= allowed:
                raise FloatingPointError(
                    f"the package must agree with the model within {allowed:.2g}, its relative "
                    f"error is {batch_error:.2g}"
                )
            error = max(error, batch_error)
        package_ms = _median_ms(package, batches[0])
        model_ms = _median_ms(model, batches[0])
    return PackageReport(error, Path(path).stat().st_size, package_ms, model_ms)


def _median_ms(call: Callable, arguments: tuple[Tensor, ...]) -> float:
    """Return the median milliseconds of a call."""
    names = {"call": call, "arguments": arguments}
    timer = Timer("call(*arguments)", globals=names, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=MIN_RUN_TIME).median


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS difference relative to the RMS of `expected`: 0 if equal, NaN with any NaN."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).square().mean()
    return 0.0 if difference == 0 else (difference / expected.square().mean()).sqrt().item()
