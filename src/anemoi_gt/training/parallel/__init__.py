"""Training on several ranks: the trainer of a sharded model, and its training step."""
