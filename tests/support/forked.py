"""Python programs in processes of their own, forks of a server that has imported what they import, which takes seconds.

Under `python -m torch.distributed.run` the ranks are forks too, all else is torchrun's. A run of
the application leaves an empty file where it draws its forecast. Where there is a GPU, programs are
spawned and ranks are torchrun's: CUDA cannot be used in a fork of a process that has initialised
it.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from unittest.mock import patch

import hydra  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.run
import torch_geometric.data  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

import anemoi_gt.app.train_command  # noqa: F401
from anemoi_gt.app import evaluate_command as evaluate
from support.garbage import collect_seldom

HAS_GPU = torch.cuda.is_available()
PROCESSES = multiprocessing.get_context("spawn" if HAS_GPU else "forkserver")
FORK = multiprocessing.get_context("fork")


@cache
def start_server():
    """Start the server, if any, which has the path of this process from Python 3.13 on."""
    if HAS_GPU:
        return
    PROCESSES.set_forkserver_preload([__name__])
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        multiprocessing.forkserver.ensure_running()


class Program(PROCESSES.Process):
    """`python *arguments` in a folder, started, with these changes of its environment."""

    def __init__(self, *arguments, folder, environment=(), files=None):
        super().__init__(args=(list(map(str, arguments)), dict(environment)))
        self.folder, self.files = (
            folder,
            files or [Path(tempfile.mkstemp()[1]) for _ in ("stdout", "stderr")],
        )
        start_server()
        self.start()

    def run(self):
        """Be the program, in the new process."""
        for number, (file, stream) in enumerate(
            zip(self.files, (sys.stdout, sys.stderr), strict=True), 1
        ):
            os.dup2(os.open(file, os.O_WRONLY), number)
            stream.reconfigure(line_buffering=True)
        collect_seldom()
        os.chdir(self.folder)
        arguments, environment = self._args
        os.environ |= environment
        torch.set_num_threads(1)
        if not HAS_GPU:
            SubprocessHandler._popen = fork_rank
        evaluate.draw_training_plot = lambda path, *_: path.touch()
        run_python(arguments)

    def finish(self, timeout):
        """Return exit status, standard output and standard error at the end, which may take `timeout` seconds."""
        self.join(timeout)
        late = f"\nstill running after {timeout} s" if self.is_alive() else ""
        self.kill()
        self.join()
        output, error = (file.read_text() for file in self.files)
        return self.exitcode, output, error + late


@contextmanager
def forked_commands():
    """Fork what `subprocess.run` and `subprocess.Popen`, with files for its output, would start of this Python."""

    run, popen = subprocess.run, subprocess.Popen

    def fork_and_wait(command, *, timeout=None, **options):
        if command[0] != sys.executable:
            return run(command, timeout=timeout, **options)
        return CompletedProcess(command, *Program(*command[1:], folder=Path.cwd()).finish(timeout))

    def fork(command, *, stdout=None, stderr=None, **options):
        if command[0] != sys.executable:
            return popen(command, stdout=stdout, stderr=stderr, **options)
        program = Program(
            *command[1:], folder=Path.cwd(), files=[Path(file.name) for file in (stdout, stderr)]
        )
        return SimpleNamespace(wait=lambda timeout: program.finish(timeout)[0])

    with patch("subprocess.run", fork_and_wait), patch("subprocess.Popen", fork):
        yield


def run_python(arguments):
    """Run `python *arguments` in this process."""
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    if arguments[0] != "-m":
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def fork_rank(handler, command, environment):
    """As `SubprocessHandler._popen`: a process that polls, waits and returns like one of `subprocess`."""
    process = FORK.Process(target=be_rank, args=(list(command), environment))
    process.start()
    return process._popen


def be_rank(command, environment):
    """Be one rank that torchrun starts."""
    os.setsid()
    os.environ.clear()
    os.environ |= environment
    run_python(command[2:])  # of python -u
