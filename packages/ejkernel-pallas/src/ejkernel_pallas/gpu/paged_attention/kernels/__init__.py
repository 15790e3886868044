"""The kernels of paged_attention."""
