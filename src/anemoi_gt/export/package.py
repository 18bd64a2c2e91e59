"""Packages: programs compiled by AOTInductor into one file, which PyTorch alone loads, from Python or from C++."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.export import ExportedProgram
from torch.utils import cpp_extension

SUFFIX = ".pt2"
PROBE = "#include <locale>\nstd::locale probe() { return std::locale(); }\n"
COPY = b"_S_create_c_locale name not valid"  # a text of libstdc++, in whatever holds its locale


def write_package(program: ExportedProgram, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Compile a program for the device that its tensors are on, and write the package.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        Of `export_program` or `export_model`.
    path : str or Path
        Ends in ".pt2"; its folder exists.
    metadata : mapping of str to str
        What a loader is told.

    Raises
    ------
    ValueError
        When the name does not end in ".pt2", metadata is more than text, or there is no C++ compiler that makes packages that
        can be loaded; raised before anything is compiled.
    OSError
        When the folder cannot be written; raised before anything is compiled.
    """
    check_place(Path(path))
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError(f"metadata must be text by names, JSON where it is more, got {dict(metadata)}")
    check_compiler()
    options = {"aot_inductor.metadata": dict(metadata), **_float_scalars()}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def check_place(path: Path) -> None:
    """Raise unless a package can be written there: ValueError for the name, OSError for the folder."""
    if path.suffix != SUFFIX:
        raise ValueError(f"a package must have a name that ends in {SUFFIX}, as PyTorch's loader wants it, got {path}")
    if path.is_dir():
        raise ValueError(f"a package is a file, {path} is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror}") from error


def check_compiler() -> None:
    """Raise ValueError where there is no C++ compiler, or one whose packages crash when they are loaded.

    A package that holds the C++ standard library, instead of asking for the one that PyTorch has, meets PyTorch's locale with its own
    and ends the process, in `std::regex`, before anything of the model runs. A compiler links so where `libstdc++.so` is missing.
    """
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "a package is compiled by a C++ compiler, none is found: install g++, or name one in CXX"
        ) from error
    if sys.platform == "linux" and _copies_standard_library(compiler):
        raise ValueError(
            f"a package must share the C++ standard library with PyTorch, {compiler} links a copy into what it makes, which "
            "crashes when it is loaded: install its libstdc++.so (libstdc++-13-dev for g++ 13), or name another compiler in CXX"
        )


def check_toolkit(device: torch.device) -> None:
    """Raise ValueError where the CUDA toolkit is missing that a package for `device` needs."""
    if device.type == "cuda" and torch.version.cuda and cpp_extension.CUDA_HOME is None:
        raise ValueError(
            "a package for a GPU needs the CUDA toolkit, none is found: install it, or name it in CUDA_HOME"
        )


def _copies_standard_library(compiler: str) -> bool:
    """Whether a library that it makes holds the C++ standard library's locale; a driver of C asks for none, which does no harm."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
        made = subprocess.run(command, input=PROBE, capture_output=True, text=True, check=False)
        if made.returncode:
            raise ValueError(f"a package is compiled by a C++ compiler, {compiler} fails: {made.stderr.strip()}")
        return COPY in library.read_bytes()


def _float_scalars() -> dict[str, bool]:
    """Numbers that a kernel is handed are float32, as in eager launches; as float64 they would make it compute so."""
    name = "_use_fp64_for_unbacked_floats"
    return {name: False} if hasattr(config, name) else {}
