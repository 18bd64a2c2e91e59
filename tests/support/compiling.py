"""Scripts in processes where Triton compiles even if this process interprets, forked from one that imported it."""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import anemoi_gt

FORK = multiprocessing.get_context("fork")
KERNELS = Path(__file__).parents[1] / "kernels"  # scripts import each other


def lines_of(script, *arguments, timeout=600):
    """Return the JSON lines that a script prints."""
    server = start()
    print(json.dumps([str(script), *arguments, timeout]), file=server.stdin, flush=True)
    status, output, error = json.loads(server.stdout.readline())
    assert status == 0, error[-4000:]
    return [json.loads(line) for line in output.splitlines()]


@cache
def start():
    """Start the process that is forked; it ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [Path(anemoi_gt.__file__).parents[1], KERNELS, KERNELS.parent]
    paths = [*map(str, paths), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__], env=environment, **pipes)


def serve():
    """Run a script for each line of stdin, and print its exit status and output."""
    import anemoi_gt.export
    import anemoi_gt.ops.triton_backend.edge_attention_triton  # noqa: F401

    for line in sys.stdin:
        script, *arguments, timeout = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
            process = FORK.Process(target=run, args=(script, arguments, timeout, output, error))
            process.start()
            process.join()
            output.seek(0)
            error.seek(0)
            result = [process.exitcode, output.read(), error.read()]
        print(json.dumps(result), flush=True)


def run(script, arguments, timeout, *files):
    """Run a script like Python within `timeout` seconds, with its output in files."""
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    signal.alarm(timeout)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    serve()
