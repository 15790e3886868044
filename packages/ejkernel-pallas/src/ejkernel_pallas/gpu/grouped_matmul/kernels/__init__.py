"""Kernels of grouped matmul, one per file, and what they share."""
