"""Computes the kernels' tables before the launch: block maps, patterns, ranges of keys and of segments, and orders."""
