"""Device code: the Triton kernels of edge attention and of graph building. Pointers and tiles; imports triton, never torch."""
