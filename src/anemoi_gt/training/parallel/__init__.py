"""Training on several ranks: sharded batches, training step, trainer and stop signals."""
