"""Kernels of ring attention, one per file, and what they share."""
