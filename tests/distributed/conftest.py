"""Results of the checks on ranks, whose processes run once for all selected checks."""

from functools import partial

import pytest
from support.once import compute_once

from distributed.ranks import run_checks


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory, worker_id, request):
    """Return the problems of each "module-check-ranks" by rank."""
    modules = set()
    for item in request.session.items:
        if hasattr(item, "callspec"):
            module = str(item.callspec.params.get("module"))
            if module.startswith("checks_"):
                modules.add(module)
    modules = sorted(modules)
    run = partial(run_checks, modules, tmp_path_factory.mktemp("checks") / "ranks")
    return compute_once("verdicts", run, tmp_path_factory, worker_id)
