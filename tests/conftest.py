"""Options of the test run, the device of the kernels (a GPU if present, else Triton's interpreter), and logging."""

import gc
import os
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from support.applications import logging_as_before, without_pictures
from support.frames import call_in_one_chunk
from support.garbage import collect_seldom, free_garbage
from support.schedule import long_first

# Imports make millions of objects, which stay; a tenth of the time until the first test is their
# collection. `collect_seldom` switches it on again.
gc.disable()

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton at import, so before any test module

# A collection after each compilation visits young objects of the whole process, and frees none that
# a test waits for; processes that tests start read the variable.
torch._dynamo.config.run_gc_after_compile = False
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

# It flushes the caches of the processor after each compilation, for a number in a log.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# Guards of compiled code name files, each thousands of times.
torch.utils._traceback.shorten_filename = cache(torch.utils._traceback.shorten_filename)

# A background job ignores SIGINT, and so would all processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # which are not part of the package


def pytest_configure(config):
    """Let the interpreter round as GPUs do, and speed it up unless Triton's own is tested."""
    if not torch.cuda.is_available():
        from support.interpreter import round_to_nearest, speed_up_interpreter

        round_to_nearest()
        if not config.getoption("--plain-interpreter"):
            speed_up_interpreter()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest's changes of logging and warnings
def pytest_collection():
    """Start the server of processes, which shares all imports, if a module of tests uses it."""
    result = yield
    if "support.forked" in sys.modules:
        sys.modules["support.forked"].start_server()
    return result


@pytest.hookimpl(trylast=True)  # after tests are deselected
def pytest_collection_modifyitems(config, items):
    """Order the tests for the workers of pytest-xdist, if there are any."""
    if hasattr(config, "workerinput"):
        items[:] = long_first(items, config.workerinput["workercount"])


def pytest_collection_finish():
    """Exclude the objects of imports and collection from garbage collection, and collect rarely."""
    collect_seldom()


def pytest_addoption(parser):
    parser.addoption(
        "--era5-path", default=None, help="GRIB file of hourly ERA5 2 m temperature, UK, March 2019"
    )
    parser.addoption(
        "--plain-interpreter", action="store_true", help="interpret kernels without our speed-up"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Let pytest call the test from a large chunk of the stack."""
    pyfuncitem.obj = partial(call_in_one_chunk, pyfuncitem.obj)


@pytest.fixture(scope="module", autouse=True)
def objects_are_collected_once():
    """Free what a module of tests leaves, so that a collection in the next visits its own objects."""
    yield
    free_garbage()


@pytest.fixture(scope="session")
def era5_path(request):
    """Path of the ERA5 file."""
    path = request.config.getoption("--era5-path")
    if path is None:
        pytest.skip("needs real weather data: pass --era5-path=FILE")
    return path


@pytest.fixture(scope="session")
def kernel_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(name="logging_as_before")
def restore_logging():
    """Undo changes of an application to logging."""
    with logging_as_before():
        yield


@pytest.fixture
def few_programs():
    """Use few programs for sums over nodes, so that each has several tiles and the interpreter is fast."""
    from support.plans import new_plans  # imports triton, after the variable above is set

    with new_plans(programs=3):
        yield


@pytest.fixture
def unordered(monkeypatch):
    """Group edges without order even if kernels are interpreted."""
    monkeypatch.setattr("anemoi_gt.graph.grouping._supports_unordered", lambda _: True)


@pytest.fixture
def anemoi_as_it_is():
    """Undo patches of Anemoi's blocks after a test."""
    from anemoi_gt.integrations import anemoi

    yield
    anemoi.uninstall()


@pytest.fixture(name="without_pictures")
def leave_out_plots(monkeypatch):
    """Write empty files instead of plots."""
    without_pictures(monkeypatch)


@pytest.fixture(scope="session")
def unoptimised_packages():
    """Compile the C++ of packages without optimisation, vector instructions and debug symbols, which take seconds.

    A precompiled header takes longer than the two files that include it.
    """
    options = {
        "aot_inductor.debug_compile": True,
        "aot_inductor.precompile_headers": False,
        "cpp.vec_isa_ok": False,
    }
    with torch._inductor.config.patch(options), pytest.MonkeyPatch.context() as patch:
        symbols = "torch._inductor.cpp_builder._get_inductor_debug_symbol_cflags"
        patch.setattr(symbols, lambda: ([], []), raising=False)
        yield


@pytest.fixture(scope="session")
def run_without_library():
    """Run a Python script with arguments in a process that cannot import this library, and return its output."""

    def run(*arguments):
        guard = "import runpy, sys; sys.modules['anemoi_gt'] = None; sys.argv = sys.argv[1:]; "
        guard += "runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-I", "-c", guard, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
