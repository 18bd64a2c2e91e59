"""Python scripts in processes forked from a server that has imported Anemoi, which takes ten seconds."""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import traceback
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["anemoi.training.train.train", "anemoi.inference.commands.run"])


def start(script, *arguments, environment, output):
    """Start a script that leads a process group and writes to a file; return its process."""
    words = (str(script), *map(str, arguments))
    process = PROCESSES.Process(target=execute, args=(words, environment, output))
    process.start()
    return process


def execute(words, environment, output):
    """Run a script as Python does, and end this process as a program ends."""
    os.setsid()
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
