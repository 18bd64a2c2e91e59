"""Garbage collections in processes of tests, which hold many objects from the start."""

import gc


def collect_seldom():
    """Leave what is there out of garbage collections, which would copy its pages in a fork, and collect seldom."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
