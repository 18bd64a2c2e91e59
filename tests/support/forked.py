"""Python programs in separate processes, forked from a server with the imports, which take seconds.

Under `python -m torch.distributed.run` the ranks are forks, too; all else is torchrun's. A run of
the application writes an empty file instead of its forecast plot. With a GPU, programs are spawned
and torchrun starts the ranks, because CUDA cannot be used in a fork of a process that has
initialised it.
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
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import anemoi_gt.app.train_command  # noqa: F401
import support.applications  # noqa: F401
from anemoi_gt.app import evaluate_command as evaluate
from support.frames import call_in_one_chunk
from support.garbage import collect_seldom

HAS_GPU = torch.cuda.is_available()
PROCESSES = multiprocessing.get_context("spawn" if HAS_GPU else "forkserver")
FORK = multiprocessing.get_context("fork")


@cache
def start_server():
    """Start the server, if any; before Python 3.13 it does not inherit the path of this process."""
    if HAS_GPU:
        return
    PROCESSES.set_forkserver_preload([__name__])
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        multiprocessing.forkserver.ensure_running()


class Program(PROCESSES.Process):
    """A started process of `python *arguments` in a folder, with changes of its environment."""

    def __init__(self, *arguments, folder, environment=(), files=None):
        super().__init__(args=(list(map(str, arguments)), dict(environment)))
        self.folder = folder
        self.files = files
        if files is None:
            self.files = [Path(tempfile.mkstemp()[1]) for _ in ("stdout", "stderr")]
        start_server()
        self.start()

    def run(self):
        """Run the program in the new process."""
        stdout, stderr = self.files
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
        os.dup2(os.open(stderr, os.O_WRONLY), 2)
        sys.stdout.reconfigure(line_buffering=True)
        sys.stderr.reconfigure(line_buffering=True)
        collect_seldom()
        os.chdir(self.folder)
        arguments, environment = self._args
        os.environ |= environment
        torch.set_num_threads(1)
        if not HAS_GPU:
            SubprocessHandler._popen = fork_rank
        # torchrun walks all loaded modules for the name of each method that it records, which is slow
        dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
        evaluate.draw_training_plot = lambda path, *_: path.touch()
        call_in_one_chunk(run_python, arguments=arguments)

    def finish(self, timeout):
        """Wait for the end, at most `timeout` seconds; return exit status, standard output and standard error."""
        self.join(timeout)
        late = f"\nstill running after {timeout} s" if self.is_alive() else ""
        self.kill()
        self.join()
        output, error = (file.read_text() for file in self.files)
        return self.exitcode, output, error + late


@contextmanager
def forked_commands():
    """Let `subprocess.run` and `subprocess.Popen` fork Python programs; Popen needs files for the output."""
    run = subprocess.run
    popen = subprocess.Popen

    def fork_and_wait(command, *, timeout=None, **options):
        if command[0] != sys.executable:
            return run(command, timeout=timeout, **options)
        program = Program(*command[1:], folder=Path.cwd())
        return CompletedProcess(command, *program.finish(timeout))

    def fork(command, *, stdout=None, stderr=None, **options):
        if command[0] != sys.executable:
            return popen(command, stdout=stdout, stderr=stderr, **options)
        files = [Path(stdout.name), Path(stderr.name)]
        program = Program(*command[1:], folder=Path.cwd(), files=files)
        return SimpleNamespace(wait=lambda timeout: program.finish(timeout)[0])

    with patch("subprocess.run", fork_and_wait), patch("subprocess.Popen", fork):
        yield


def run_python(arguments):
    """Run `python *arguments` in this process."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def fork_rank(handler, command, environment):
    """Replace `SubprocessHandler._popen`: return a forked process with the interface of `subprocess.Popen`."""
    process = FORK.Process(target=be_rank, args=(list(command), environment))
    process.start()
    return process._popen


def be_rank(command, environment):
    """Run one rank that torchrun starts."""
    os.setsid()
    os.environ.clear()
    os.environ |= environment
    call_in_one_chunk(run_python, arguments=command[2:])  # of python -u
