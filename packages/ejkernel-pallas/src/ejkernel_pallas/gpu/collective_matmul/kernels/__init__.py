"""The kernels of collective matmul on Hopper, one per file, and what they share."""
