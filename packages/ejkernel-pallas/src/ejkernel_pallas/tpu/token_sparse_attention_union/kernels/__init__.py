"""The kernels of token-sparse attention."""
