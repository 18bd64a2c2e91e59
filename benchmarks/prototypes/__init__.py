"""Kernels that are predicted to pay and are not yet measured. Measured, a kernel moves into the package or goes; NOTES.md says which."""
