"""Device code: the Triton kernels of edge attention and graph building; no torch."""
