"""The kernels of the selected branch of native sparse attention."""
