"""A toolkit for kernels on NVIDIA's Hopper in Mosaic GPU, free of any operation."""
