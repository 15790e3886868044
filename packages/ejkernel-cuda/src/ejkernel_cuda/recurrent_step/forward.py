"""The call of the decode step of linear recurrences (csrc/recurrent_step.cu)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching

from ejkernel.families.linear_recurrence import LinearRecurrence, head_count
from ejkernel.planning.in_place import unfused
from ejkernel_cuda.library import registered


def forward(record: LinearRecurrence, config: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Output and final states of a record.

    States in float32 are updated in their own memory: XLA copies them before only if they are used elsewhere, as those
    of a call that does not donate them are.

    Args:
        record: The canonical arguments.
        config: It leaves nothing to choose.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32, or the slots; no residuals.
    """
    (rows, tokens, _, keys), heads, float32 = record.query.shape, head_count(record), jnp.float32
    packed, columns = record.cu_seqlens is not None, record.value.shape[3]
    initial = record.sequence_state if packed else record.initial_state
    sequences = rows if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    plain = (sequences, heads, *((columns, keys) if record.transposed_states else (keys, columns)))
    final = jax.ShapeDtypeStruct(plain if initial is None else initial.shape, float32)
    call = functools.partial(
        jax.ffi.ffi_call(
            registered("ejkernel_recurrent_step"),
            (jax.ShapeDtypeStruct((rows, tokens, heads, columns), record.query.dtype), final),
            # Operand 9 are the states, which the kernel changes where they are.
            input_output_aliases={} if initial is None else {9: 1},
            # Leading axes of gates may be 1.
            vmap_method="sequential",
        ),
        transposed=record.transposed_states,
        scale=np.float32(record.softmax_scale),
    )
    operands = (
        *(record.query, record.key, record.value),
        *(_numbers(x, record) for x in (record.decay, record.beta, record.dt, record.skip)),
        *(
            jnp.zeros(0, jnp.int32) if x is None else x.astype(jnp.int32)
            for x in (record.cu_seqlens, record.state_slots)
        ),
        jnp.zeros(0, float32) if initial is None else initial.astype(float32),
    )
    # Under `jax.vmap` a loop has the barriers of `unfused` inside, where the slices are.
    run = call if initial is None else custom_batching.sequential_vmap(functools.partial(unfused, call))
    output, states = run(*operands)
    return (output, states), ()


def _numbers(x: jax.Array | None, record: LinearRecurrence) -> jax.Array:
    """Gates and factors in the query's dtype or in float32, without elements where there are none."""
    if x is None:
        return jnp.zeros(0, jnp.float32)
    channels = x.ndim == 4 and x.shape[3] > 1  # always read as float32
    return x if x.dtype == record.query.dtype and not channels else x.astype(jnp.float32)
