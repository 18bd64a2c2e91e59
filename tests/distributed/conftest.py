"""Results of the checks on ranks, whose processes run once for all checks that a test run asks for."""

import fcntl
import json

import pytest

from distributed.ranks import run_checks


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory, worker_id, request):
    """Problems by rank, by "module-check-ranks"."""
    folder = tmp_path_factory.getbasetemp()
    # one for all workers of pytest-xdist
    folder = folder if worker_id == "master" else folder.parent
    calls = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    modules = sorted(
        {params["module"] for params in calls if str(params.get("module")).startswith("checks_")}
    )
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = folder / "verdicts.json"
        if not report.exists():
            report.write_text(json.dumps(run_checks(modules, folder / "ranks")))
        return json.loads(report.read_text())
