"""Kernels of collective matmul, one per file, and what they share."""
