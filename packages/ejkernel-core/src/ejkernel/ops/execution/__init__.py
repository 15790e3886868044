"""Running and measuring: kernels as objects, executors, the tuner, offline tuning."""
