"""The kernels of the linear recurrence, and the arithmetic of a chunk that they share."""
