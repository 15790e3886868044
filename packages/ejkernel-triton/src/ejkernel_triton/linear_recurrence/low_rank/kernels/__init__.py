"""Kernels of recurrences whose transitions are diagonal plus low rank."""
