"""The application: commands with Hydra configs, data sets from files, training, scores, plots and exports.

The library does not import it.
"""
