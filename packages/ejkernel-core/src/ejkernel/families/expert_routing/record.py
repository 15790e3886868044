"""Defines the argument record of expert routing, and functions of the record alone."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.arguments import arguments, static

Routing = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Experts [T, K], places [T, K], order [T * K] and sizes [E], all int32."""


@arguments
class ExpertRouting:
    """Canonical input of one routing. T tokens, E experts, K experts per token.

    Attributes:
        logits: [T, E] floating.
        top_k: K.
    """

    logits: jax.Array
    top_k: int = static()


def order_preserving_integers(logits: jax.Array) -> jax.Array:
    """Returns integers in the order of logits. A sort of floats puts -0 below 0, and a NaN whose sign
    bit is set last.
    """
    digits = jnp.finfo(logits.dtype)
    bits = lax.bitcast_convert_type(logits, f"int{digits.bits}")
    most = jnp.iinfo(bits.dtype).max
    magnitude = bits & most
    # The magnitudes of floats are in the order of their bits. The bits of infinity come directly before those of NaN.
    infinity = ((1 << digits.nexp) - 1) << digits.nmant
    signed = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > infinity, most, signed)


def sorted_by_expert(experts: jax.Array, count: int) -> Routing:
    """Returns the routing of experts that are chosen.

    Args:
        experts: [T, K] int32.
        count: E.
    """
    key = experts.reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    positions = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(key[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    return experts, positions.reshape(experts.shape), order, sizes
