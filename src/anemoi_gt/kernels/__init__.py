"""Device code: the Triton kernels of edge attention. It speaks of pointers and tiles and imports triton, never torch."""
