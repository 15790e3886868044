"""The kernels of the causal convolution."""
