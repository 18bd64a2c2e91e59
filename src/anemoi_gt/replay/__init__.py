"""Steps captured in CUDA graphs and replayed, and the random number generators they draw from."""
