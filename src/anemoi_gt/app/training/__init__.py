"""Training from Python, without config files: hyperparameters, steps, checkpoints, metrics."""

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.trainer import Trainer

__all__ = ["Trainer", "TrainingConfig"]
