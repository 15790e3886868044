"""The kernels of the cross-entropy."""
