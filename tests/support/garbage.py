"""Garbage collection in test processes, which have many objects from the start."""

import gc


def collect_seldom():
    """Exclude existing objects from garbage collection, which would copy their pages in a fork, and collect rarely."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


def free_garbage():
    """Free garbage, and exclude what remains from later collections: each would visit all of it, for half a second."""
    gc.collect()
    gc.freeze()
