"""What the tests on several ranks share: the processes, started once for all checks that a test run asks for."""

import fcntl
import json

import pytest

from distributed.ranks import HERE, TIMEOUT, WORLD_SIZE, found, spawn_checks, verdicts


@pytest.fixture(scope="session")
def verdicts_of(tmp_path_factory, worker_id, request):
    """What the ranks found: a function from the name of a module of checks to {(check, ranks): problems by rank}."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent  # one folder for all workers of pytest-xdist
    asked = {item.path.stem.replace("test_", "checks_") for item in request.session.items if item.path.parent == HERE}
    modules = sorted(name for name in asked if (HERE / f"{name}.py").exists())

    def of(module_name):
        run_together(modules, shared)
        return verdicts(module_name, WORLD_SIZE, shared)

    return of


def run_together(modules, folder):
    """Run the checks of all modules in the same processes, once; where one ends them, each module is left to start its own."""
    together = folder / "together"
    together.mkdir(exist_ok=True)
    with (together / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (together / "started").exists():
            return
        (together / "started").touch()
        ended = spawn_checks(modules, WORLD_SIZE, together, TIMEOUT * len(modules))
        if all(end.status == 0 for end in ended):
            for module in modules:
                (folder / module).mkdir()
                said = found(f"distributed.{module}", together / module, ended)
                (folder / module / "verdicts.json").write_text(json.dumps(said))
