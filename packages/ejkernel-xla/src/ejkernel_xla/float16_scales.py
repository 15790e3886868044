"""Scales that keep small gradients in float16, whose least positive number is 2**-24."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import power_of_two


def cast_scaled(x: jax.Array, dtype: Any, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array | float]:
    """Returns `x / scale` in another dtype, and the scale, by which a product with it is multiplied.

    A mean over many tokens has cotangents that float16 rounds to 0. The scale is a power of two, which rounds nothing,
    and leaves numbers of at most 2. Other dtypes have the exponents of float32, and a scale of 1.

    Args:
        x: Factors of gradients.
        dtype: The dtype of the product's operands.
        axes: The axes of x that share a scale; they have size 1 in it.
    """
    if dtype != jnp.float16:
        return x.astype(dtype), 1.0
    scale = power_of_two(jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=axes, keepdims=True))
    return (x / scale).astype(dtype), scale
