"""Results that are computed once for all workers of pytest-xdist."""

import fcntl
import json


def compute_once(name, compute, tmp_path_factory, worker_id):
    """Return the result of `compute()`, which the first worker to ask for `name` computes and stores as JSON."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent
    result = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(json.dumps(compute()))
        return json.loads(result.read_text())
