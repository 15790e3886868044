"""What all kernels in Pallas need installed."""

JAX = ("jax>=0.10,<0.13",)
"""Pallas is no stable interface: its kernels are refused under a JAX that they were not tried with."""
