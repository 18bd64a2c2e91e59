"""Plots of training runs and forecasts, by matplotlib."""
