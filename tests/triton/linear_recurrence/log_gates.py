"""Logs of gates of recurrences, from mild ones to resets."""

import jax
import jax.numpy as jnp
import numpy as np

STRENGTHS = ("mild", "initial", "harsh", "-inf")


def gates_of(strength, key, shape):
    """Log gates, [1, T, H, channels]: as trained, as KDA and Mamba-2 initialise them, of normal logits, and resets."""
    x = jax.nn.log_sigmoid(jax.random.normal(key, shape))
    if strength == "mild":
        return x / 16
    if strength == "initial":
        rates, steps = jax.random.split(key)
        dt = jnp.exp(jax.random.uniform(steps, shape, minval=np.log(1e-3), maxval=np.log(0.1)))
        return -jax.random.uniform(rates, (shape[2], 1), minval=1.0, maxval=16.0) * dt
    return x if strength == "harsh" else jnp.where(jax.random.uniform(key, shape) < 0.2, -jnp.inf, x)
