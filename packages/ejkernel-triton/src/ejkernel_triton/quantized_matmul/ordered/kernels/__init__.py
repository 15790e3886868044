"""The kernels, one per file."""
