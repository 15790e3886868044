"""The FFI call of the chunked delta rule (csrc/delta_rule/chunked.cu)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel_cuda.library import register_handler


def forward(record: LinearRecurrence, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record with beta.

    Args:
        record: The canonical arguments.
        config: Unused: the kernel has no options.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states [B, H, K, V] in float32; no residuals.
    """
    assert record.beta is not None  # `Requires` ensures it
    (rows, tokens, _, keys), heads, float32 = record.query.shape, num_state_heads(record), jnp.float32
    columns = record.value.shape[3]
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_delta_rule"),
        (
            jax.ShapeDtypeStruct((rows, tokens, heads, columns), record.query.dtype),
            jax.ShapeDtypeStruct((rows, heads, keys, columns), float32),
        ),
        # The leading axes of gates may have size 1, so arrays do not batch alike.
        vmap_method="sequential",
    )
    decay, initial, absent = record.decay, record.initial_state, jnp.zeros(0, float32)
    if decay is not None:
        decay = jnp.broadcast_to(decay[..., 0].astype(float32), (rows, tokens, heads))
    output, states = call(
        *(record.query, record.key, record.value),
        absent if decay is None else decay,
        record.beta.astype(float32),
        absent if initial is None else initial.astype(float32),
        scale=np.float32(record.softmax_scale),
    )
    return (output, states), ()
