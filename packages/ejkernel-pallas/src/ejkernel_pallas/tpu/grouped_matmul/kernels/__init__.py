"""Kernels of grouped matmul, one per file, and the refs that they share."""
