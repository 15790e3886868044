"""Products that are rounded before they are added to something, in every program."""

import jax
import jax.numpy as jnp


def rounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x * y, with the same bits in every program; infinities become the largest finite numbers.

    Without the clip, LLVM rounds a product and its sum with other numbers once in some programs and twice in others: a
    row would have other bits in another batch.
    """
    product = x * y
    largest = jnp.finfo(product.dtype).max
    return jnp.clip(product, -largest, largest)
