"""The installation requirements of all Pallas kernels."""

JAX = ("jax>=0.10,<0.13",)
"""Pallas is not a stable interface: its kernels are refused with versions of JAX that they were not tested with."""
