"""Results of the checks on ranks, whose processes run once for all checks that a test run asks for."""

from functools import partial

import pytest
from support.once import compute_once

from distributed.ranks import run_checks


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory, worker_id, request):
    """Problems by rank, by "module-check-ranks"."""
    calls = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    modules = sorted(
        {params["module"] for params in calls if str(params.get("module")).startswith("checks_")}
    )
    run = partial(run_checks, modules, tmp_path_factory.mktemp("checks") / "ranks")
    return compute_once("verdicts", run, tmp_path_factory, worker_id)
