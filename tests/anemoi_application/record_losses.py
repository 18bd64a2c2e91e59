"""A callback that writes the id of a training, its losses, batch times, and numbers of attentions and halo exchanges."""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import pytorch_lightning as pl


class RecordLosses(pl.Callback):
    """Write the records of the first rank to a file at the end."""

    def __init__(self, path):
        self.path = Path(path)
        self.report = {"losses": [], "seconds": [], "attentions": 0, "exchanges": 0, "id": None}

    def on_train_start(self, trainer, module):
        ours = sys.modules.get("anemoi_gt.integrations.anemoi.blocks")
        if ours is None:  # in a training without anemoi_gt
            return
        ours.edge_attention = self.count("attentions", ours.edge_attention)
        exchange = import_module("anemoi_gt.distributed").HaloExchange
        exchange.start = self.count("exchanges", exchange.start)

    def count(self, name, function):
        """Return a function that counts its calls."""

        def counted(*operands, **options):
            self.report[name] += 1
            return function(*operands, **options)

        return counted

    def on_train_batch_start(self, *_):
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.report["seconds"].append(time.perf_counter() - self.started)
        self.report["losses"].append(float(outputs["loss"]))

    def on_train_end(self, trainer, *_):
        self.report["id"] = Path(trainer.checkpoint_callback.dirpath).name
        if trainer.is_global_zero:  # the ranks share the path
            self.path.write_text(json.dumps(self.report))
