"""What the tests on several ranks share: the processes, started once for all checks of a module."""

import pytest

from distributed.ranks import WORLD_SIZE, verdicts


@pytest.fixture(scope="session")
def verdicts_of(tmp_path_factory, worker_id):
    """What the ranks found: a function from the name of a module of checks to {(check, ranks): problems by rank}."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent  # one folder for all workers of pytest-xdist

    def of(module_name):
        return verdicts(f"distributed.{module_name}", WORLD_SIZE, shared / module_name)

    return of
