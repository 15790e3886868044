"""The building blocks of all TPU kernels: launching, loops, opaque offsets, division, vectors. They contain no code of
attention.
"""
