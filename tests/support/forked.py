"""Python programs in separate processes, forked from a server that has imported what they import.

The server is a fork of this process, after it has imported the tests and before it runs one: imports
take seconds. Under `python -m torch.distributed.run` the ranks are forks, too; all else is
torchrun's. A run of the application writes an empty file instead of its forecast plot. With a GPU,
programs are spawned and torchrun starts the ranks, because CUDA cannot be used in a fork of a process
that has initialised it.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
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
import scipy.spatial  # noqa: F401
import torch
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
import torch.distributed.run
import torch_geometric.data  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from tqdm import tqdm

import anemoi_gt.app.train_command  # noqa: F401
import support.applications  # noqa: F401
from anemoi_gt.app import evaluate_command
from support.frames import call_in_one_chunk
from support.garbage import collect_seldom

HAS_GPU = torch.cuda.is_available()
PROCESSES = multiprocessing.get_context("spawn" if HAS_GPU else "forkserver")
FORK = multiprocessing.get_context("fork")


@cache
def start_server():
    """Start the server, if any, in a fork of this process."""
    if not HAS_GPU:
        tqdm.get_lock()  # would register a semaphore in each process, which leaves it
        multiprocessing.resource_tracker.ensure_running()  # a process of its own
        with patch("multiprocessing.util.spawnv_passfds", fork_server):
            multiprocessing.forkserver.ensure_running()


def fork_server(_, command, files):
    """Replace `spawnv_passfds`: run the code of a Python command in a fork that has these open files."""
    pid = os.fork()
    if pid == 0:
        # Other files, among them pytest's, lead nowhere: if they were closed, objects that are
        # inherited with them would write to files that get their numbers.
        null = os.open(os.devnull, os.O_RDWR)
        for number in set(map(int, os.listdir("/proc/self/fd"))) - set(files):
            os.dup2(null, number)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            exec(command[-1])
        finally:
            os._exit(0)
    return pid


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
        # instead of pytest's, which the server has inherited
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
        os.dup2(os.open(stderr, os.O_WRONLY), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for name in (None, *logging.root.manager.loggerDict):
            logger = logging.getLogger(name)
            for handler in logger.handlers[:]:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(sys.stderr)
                else:
                    logger.removeHandler(handler)
        collect_seldom()
        os.chdir(self.folder)
        arguments, environment = self._args
        os.environ |= environment
        torch.set_num_threads(1)
        if not HAS_GPU:
            SubprocessHandler._popen = fork_rank
        # torchrun walks all loaded modules for the name of each method that it records, which is slow
        dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
        evaluate_command.draw_training_plot = lambda path, *_: path.touch()
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
    # a new process would not have torchrun's, with which a rank that is ended prints a traceback
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    call_in_one_chunk(run_python, arguments=command[2:])  # of python -u
