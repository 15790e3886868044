"""The FFI call of the decode step of linear recurrences (csrc/recurrent_step/recurrent_step.cu)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads, unchanged_states
from ejkernel.planning.in_place import call_unfused
from ejkernel_cuda.library import register_handler


def forward(record: LinearRecurrence, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output and the final states of a record.

    float32 states are updated in place: XLA copies them first only if they are used elsewhere, for example by a caller
    that does not donate them.

    Args:
        record: The canonical arguments.
        config: Unused: the kernel has no options.

    Returns:
        Output [B, T, H, V] in the query's dtype, and the final states in float32 or the array of slots, which trees
        leave as they were; no residuals.
    """
    (rows, tokens, _, keys), heads, float32 = record.query.shape, num_state_heads(record), jnp.float32
    packed, columns = record.cu_seqlens is not None, record.value.shape[3]
    initial = record.sequence_state if packed else record.initial_state
    sequences = rows if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    state_shape = (sequences, heads, *((columns, keys) if record.transposed_states else (keys, columns)))
    trees = record.parents is not None
    final = jax.ShapeDtypeStruct((1,) if trees else state_shape if initial is None else initial.shape, float32)
    call = functools.partial(
        jax.ffi.ffi_call(
            register_handler("ejkernel_recurrent_step"),
            (jax.ShapeDtypeStruct((rows, tokens, heads, columns), record.query.dtype), final),
            # The last operand is the array of states, which the kernel updates in place.
            input_output_aliases={} if initial is None or trees else {10: 1},
            # The leading axes of gates may have size 1, so arrays do not batch alike.
            vmap_method="sequential",
        ),
        transposed=record.transposed_states,
        scale=np.float32(record.softmax_scale),
    )
    operands = (
        *(record.query, record.key, record.value),
        *(_cast_gates_or_make_empty(x, record) for x in (record.decay, record.beta, record.dt, record.skip)),
        *(
            jnp.zeros(0, jnp.int32) if x is None else x.astype(jnp.int32)
            for x in (record.parents, record.cu_seqlens, record.state_slots)
        ),
        jnp.zeros(0, float32) if initial is None else initial.astype(float32),
    )
    # Under `jax.vmap` the loop's body has the barriers of `call_unfused`, so that they also apply to its slices.
    call_with_states = (
        call if initial is None or trees else custom_batching.sequential_vmap(functools.partial(call_unfused, call))
    )
    output, states = call_with_states(*operands)
    return (output, unchanged_states(record) if trees else states), ()


def _cast_gates_or_make_empty(x: jax.Array | None, record: LinearRecurrence) -> jax.Array:
    """Returns gates or factors in the query's dtype or in float32; an absent array becomes an empty one."""
    if x is None:
        return jnp.zeros(0, jnp.float32)
    has_decay_per_channel = x.ndim == 4 and x.shape[3] > 1  # always read as float32
    return x if x.dtype == record.query.dtype and not has_decay_per_channel else x.astype(jnp.float32)
