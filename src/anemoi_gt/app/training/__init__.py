"""Training from a model and a data set, without config files: checkpoints, scores, plots."""

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.trainer import Trainer

__all__ = ["Trainer", "TrainingConfig"]
