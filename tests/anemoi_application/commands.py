"""Python scripts in processes forked from a server that has imported Anemoi, which takes ten seconds.

The ranks that Lightning and torchrun start are forks of the same server.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "anemoi.training.train.train",
        "anemoi.training.train.methods",
        "anemoi.training.losses.scalers",
        "anemoi.graphs.edges",
        "anemoi.models.models",
        "timm.scheduler",
        "anemoi.inference.commands.run",
        "anemoi.inference.outputs.netcdf",
        "torch.distributed.run",
    ]
)


def start_server():
    """Start the server, if this process has none; return its address."""
    server = forkserver._forkserver
    server.ensure_running()
    return server._forkserver_address


def join_server(address):
    """Let this process start others by a server that another process has started and ends."""
    server = forkserver._forkserver
    server._forkserver_address = address
    _, server._forkserver_alive_fd = os.pipe()
    server.ensure_running = lambda: None  # it would start one of its own


def start(script, *arguments, environment, output):
    """Start a script that leads a process group and writes to a file; return its process."""
    words = (str(script), *map(str, arguments))
    server = start_server()
    process = PROCESSES.Process(target=execute, args=(words, environment, output, server))
    process.start()
    return process


def start_rank(command, env, cwd=None, *, output):
    """Start a rank of a script here, which has the same working directory, as `subprocess.Popen` would."""
    words = command[1:] if command[0] == sys.executable else command
    process = start(*words, environment=env, output=output)._popen
    process.send_signal = process._send_signal
    return process


def fork_ranks(output):
    """Let Lightning and torchrun start their ranks by the server."""
    from pytorch_lightning.strategies.launchers import subprocess_script
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    rank = partial(start_rank, output=output)
    subprocess_script.subprocess = SimpleNamespace(Popen=rank)
    SubprocessHandler._popen = lambda _, command, env: rank(command, env)


def leave_out_provenance():
    """Write no versions of modules to checkpoints: Anemoi takes a quarter of a short training to collect them."""
    from anemoi.utils import provenance

    provenance.module_versions = lambda full: ({}, {})


def end_with_parent():
    """End this process and those that it started when the one that started it has ended, even if by a signal."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def execute(words, environment, output, server):
    """Run a script as Python does, and end this process as a program ends."""
    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    join_server(server)
    fork_ranks(output)
    leave_out_provenance()
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    multiprocessing.set_start_method(None, force=True)  # a program may still choose one
    os.environ |= environment
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = list(words)
    status = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    # A process of multiprocessing would wait for the workers of pools before it shuts the pools down.
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(status)


def new_file():
    """Return the path of an empty file."""
    number, name = tempfile.mkstemp()
    os.close(number)
    return Path(name)
