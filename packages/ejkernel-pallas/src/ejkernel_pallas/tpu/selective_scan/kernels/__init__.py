"""The kernels of the selective scan."""
