"""Training: from a model and a data set to weights, checkpoints, metrics, scores and plots, without config files."""

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.trainer import Trainer

__all__ = ["Trainer", "TrainingConfig"]
