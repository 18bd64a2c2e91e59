"""Device code: the Triton kernels of edge attention and graph building. Pointers and tiles; triton, never torch."""
