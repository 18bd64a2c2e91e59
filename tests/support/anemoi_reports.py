"""Print reports of versions of anemoi-models: `python anemoi_reports.py all FOLDER... minor FOLDER...`.

Each version runs in its own process, forked from one with the common imports, which take seconds.
"""

import json
import multiprocessing
import sys

import hydra  # noqa: F401
import torch
import torch_geometric.nn  # noqa: F401

import anemoi_gt.nn
import anemoi_gt.ops.triton_backend  # noqa: F401
from support.garbage import collect_seldom
from support.interpreter import patch_interpreter


def run(folder, kind):
    """Print the report on the version in a folder, in a process of its own."""
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    from support import anemoi_versions

    reports = {"all": anemoi_versions.report_all, "minor": anemoi_versions.report_minor}
    print(json.dumps(reports[kind]()), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        patch_interpreter()
    torch.compile(torch.sin, backend="eager")(torch.zeros(1))  # makes tables that forks share
    collect_seldom()
    for argument in sys.argv[1:]:
        if argument in ("all", "minor"):
            kind = argument
            continue
        process = multiprocessing.get_context("fork").Process(target=run, args=(argument, kind))
        process.start()
        process.join()
        if process.exitcode != 0:
            sys.exit(f"{argument}: exit status {process.exitcode}")
