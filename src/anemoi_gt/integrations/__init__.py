"""Integrations with anemoi-models and PyTorch Geometric; import each by its own name."""
