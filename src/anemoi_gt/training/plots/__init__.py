"""Figures of a training run and of its forecasts, by matplotlib."""
