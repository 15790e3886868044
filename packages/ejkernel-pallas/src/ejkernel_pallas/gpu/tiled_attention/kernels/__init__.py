"""The kernels of tiled_attention."""
