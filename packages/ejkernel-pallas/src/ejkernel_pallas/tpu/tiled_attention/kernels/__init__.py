"""Kernels of tiled attention, one per file, and what they share."""
