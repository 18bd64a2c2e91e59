"""The application: Hydra commands, data sets, training, scores, plots and export.

The library does not import it.
"""
