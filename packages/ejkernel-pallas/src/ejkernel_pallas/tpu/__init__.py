"""Kernels for TPUs, in Mosaic TPU."""
