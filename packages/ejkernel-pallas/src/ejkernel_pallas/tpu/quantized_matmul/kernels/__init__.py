"""Kernels of the quantized matmul, one per file, and what they share."""
