"""Options of the test run, the device of the kernels (a GPU if present, else Triton's interpreter), and logging."""

import gc
import os

import pytest
import torch
from support.applications import logging_as_before

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton at import, hence before any test module
    from support.interpreter import speed_up_interpreter

    speed_up_interpreter()


LONG = (  # files of more than ten seconds, longest first
    *("distributed/test_on_ranks.py", "kernels/test_compile.py", "distributed/test_application.py"),
    *("export/test_application.py", "integrations/test_anemoi_compiled.py", "training/test_skill.py"),
    *("training/test_interruption.py", "export/test_program.py", "export/test_package.py", "ops/test_triton_random.py"),
)


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that what several processes share at the end is short."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(LONG)))


def pytest_collection_finish():
    """Leave what imports and collection made out of garbage collections, of which each would visit it."""
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--era5-path", default=None, help="GRIB file of hourly ERA5 2 m temperature over the UK, March 2019"
    )


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
def anemoi_as_it_is():
    """Undo patches of Anemoi's blocks after a test."""
    from anemoi_gt.integrations import anemoi

    yield
    anemoi.uninstall()
