"""Changes of scores that the reference and the kernels share: the soft cap, and rounding to a narrower dtype."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning.precision import rounded
from ejkernel.promotion import with_standard_promotion


def apply_soft_cap(scores: jax.Array, cap: float) -> jax.Array:
    """Returns scores within (-cap, cap); what an additive mask of -inf masks stays masked, and has gradient 0."""
    masked = scores == -jnp.inf
    return jnp.where(masked, -jnp.inf, cap * jnp.tanh(jnp.where(masked, 0, scores) / cap))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def round_to_logits_dtype(dtype: Any, scores: jax.Array) -> jax.Array:
    """Returns scores with the digits of a narrower dtype, in their own; derivative 1."""
    return rounded(scores, dtype)


@round_to_logits_dtype.defjvp
@with_standard_promotion
def _round_to_logits_dtype_jvp(
    dtype: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_to_logits_dtype(dtype, *primals), tangents[0]
