"""Training, export and the example's loaders as a user runs them, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gpu_checks import DEVICE, ROOT

EXAMPLE = ROOT / "examples" / "run_package"
SMALL = [
    "data.grid_name=O4",
    "data.train_size=8",
    "data.valid_size=2",
    "data.test_size=3",
    "graph.refinement=1",
    "model.num_layers=1",
    "training.steps=4",
    "training.warmup_steps=1",
    "training.batch_size=2",
]
ON_DEVICE = [
    f"training.device={DEVICE.type}",
    f"kernels.backend={'triton' if DEVICE.type == 'cuda' else 'torch'}",
]
SAMPLES, LIMIT = 3, 300.0  # s, for one command


def exported_and_loaded() -> str:
    """Export a trained run, and compare the package in Python and in C++, without this library."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [str(_installed(folder / "site"))]
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if path:
                paths.append(str(Path(path).resolve()))
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        run = folder / "run"
        package = folder / "model.pt2"
        x = folder / "x.pt"
        train = [sys.executable, "-m", "anemoi_gt.train", *SMALL, *ON_DEVICE]
        _execute([*train, f"hydra.run.dir={run}"], folder, environment)
        export = [sys.executable, "-m", "anemoi_gt", "export", f"checkpoint={run / 'last.pt'}"]
        export += [f"out={package}", f"max_batch={SAMPLES}", f"hydra.run.dir={folder / 'export'}"]
        output = _execute(export, folder, environment)
        generator = torch.Generator().manual_seed(0)
        torch.save(torch.randn(SAMPLES, *_shape(package), generator=generator), x)
        python_loader = [sys.executable, "-I", EXAMPLE / "run_package.py"]
        _execute([*python_loader, package, x, folder / "python.pt"], folder)
        cpp_loader = _compiled(folder / "run_package")
        _execute([cpp_loader, package, x, folder / "cpp.pt"], folder)
        from_python = torch.load(folder / "python.pt")
        from_cpp = torch.load(folder / "cpp.pt")
    torch.testing.assert_close(from_cpp, from_python, rtol=1e-5, atol=1e-6)
    lines = []
    for line in output.splitlines():
        if line.startswith(("verified", "batch size 1", "written")):
            lines.append(line)
    return "; ".join([*lines, "Python and C++ agree"])


def _installed(site: Path) -> Path:
    """Link the package and its configs into a folder, as a wheel installs them."""
    package = site / "anemoi_gt"
    package.mkdir(parents=True)
    for part in (ROOT / "src" / "anemoi_gt").iterdir():
        (package / part.name).symlink_to(part)
    (package / "configs").symlink_to(ROOT / "configs")
    return site


def _shape(package: Path) -> list[int]:
    """Return nodes and channels of a sample, from the package metadata."""
    metadata = torch._inductor.aoti_load_package(str(package)).get_metadata()
    return json.loads(metadata["inputs"])[0]["shape"][1:]


def _compiled(program: Path) -> Path:
    """Compile the C++ loader against the libraries of the PyTorch that runs this check."""
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    names = ["torch", "torch_cpu", "c10"]
    if DEVICE.type == "cuda":
        names += ["torch_cuda", "c10_cuda"]
    # The GPU libraries are not called by name: they register themselves when loaded.
    linker = [
        "-Wl,--no-as-needed",
        "-Wl,--allow-shlib-undefined",
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
    ]
    linker += [f"-l{name}" for name in names]
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", f"-I{torch_folder / 'include'}"]
    _execute([*compiler, EXAMPLE / "main.cpp", "-o", program, *linker], ROOT)
    return program


def _execute(command: list, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Return the output of a command; raise with its last lines when it fails."""
    command = list(map(str, command))
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout + done.stderr
