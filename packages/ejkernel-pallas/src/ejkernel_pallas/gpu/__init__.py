"""Mosaic GPU kernels, for NVIDIA's Hopper."""
