"""Run the small model of versions of anemoi-models without us and with us: `python anemoi_minor_versions.py FOLDER...`.

One process for each version, forks of one that has imported what all of them import, which takes
seconds.
"""

import json
import logging
import multiprocessing
import sys

import hydra  # noqa: F401
import torch
import torch_geometric.nn  # noqa: F401

import anemoi_gt.nn  # noqa: F401


def run(folder):
    """Print what differs in the version of a folder, in a process of its own."""
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    from support import anemoi_transformer_versions, anemoi_versions

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("anemoi_gt").addHandler(handler)
    report = anemoi_versions.compare(anemoi_versions.build("GraphTransformer"))
    report["updated sources"] = anemoi_versions.updated_sources()
    if anemoi_versions.VERSION < (0, 15):
        report["transformers"] = anemoi_transformer_versions.compare()
    report |= {"version": anemoi_versions.version("anemoi-models"), "said": said}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder,))
        process.start()
        process.join()
        if process.exitcode != 0:
            sys.exit(f"{folder}: exit status {process.exitcode}")
