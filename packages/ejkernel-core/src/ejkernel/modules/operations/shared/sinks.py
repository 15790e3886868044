"""Attention sinks, `softmax_aux`: logits that join the softmax denominator, unscaled and unmasked, and carry no value.

Every operation reads them alike:

| shape | meaning |
|---|---|
| [H] | one sink a head, H being the number of query heads |
| [num_sinks], another length | sinks that all heads share |
| [1, num_sinks] | the same, of any length |
| [H, num_sinks] | sinks of each head |

The dtype is floating, and the gradient is the true one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape


def check_sinks(softmax_aux: Any, heads: int) -> None:
    """Checks optional sinks.

    Args:
        softmax_aux: The argument's value, or None.
        heads: Number of query heads.

    Raises:
        ValueError: The sinks have another shape or no floating dtype.
    """
    if softmax_aux is None:
        return
    axes = "H num_sinks" if jnp.ndim(softmax_aux) == 2 else "num_sinks"
    try:
        check_shape("softmax_aux", softmax_aux, axes, {"H": heads}, broadcast="H")
    except ValueError as error:
        raise ValueError(f"{error} or [H={heads}, num_sinks]") from None
    check_not_empty("softmax_aux", softmax_aux, axes, "num_sinks")
    check_dtype("softmax_aux", softmax_aux, jnp.floating, "a floating dtype")


def sink_logits(softmax_aux: jax.Array | None, heads: int, dtype: Any) -> jax.Array | None:
    """Returns one logit a head with the mass of all its sinks, [H], at least float32; None of none.

    Args:
        softmax_aux: Sinks that `check_sinks` has passed, or None.
        heads: Number of query heads.
        dtype: The query's.
    """
    if softmax_aux is None:
        return None
    logits = softmax_aux.astype(jnp.promote_types(dtype, jnp.float32))
    if logits.shape == (heads,):
        return logits
    # Replaces `jax.nn.logsumexp`, whose gradient is NaN if sinks are switched off with -inf.
    row_max = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    row_max = jnp.where(jnp.isfinite(row_max), row_max, 0)
    row_sum = jnp.sum(jnp.exp(logits - row_max), axis=-1)
    lse = jnp.where(row_sum > 0, jnp.log(jnp.where(row_sum > 0, row_sum, 1)) + row_max[..., 0], -jnp.inf)
    return jnp.broadcast_to(lse, (heads,))
