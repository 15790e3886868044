"""The FFI calls of the forward pass with a gate per head or none, with the delta rule or without, and of the states
that rows add to zeros, without outputs (csrc/delta_rule/chunked.cu).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, final_states_shape, num_state_heads
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_cuda.delta_rule.plan import (
    SEGMENT_PARTS,
    chunk_table,
    chunks_before_an_empty_segment,
    num_chunks,
    num_segments,
    num_segments_without_scan,
    scan_handler,
    segment_results,
    starting_states,
)
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.split_values import forward_with_split_values


class DeltaResiduals(NamedTuple):
    """The results of the forward pass that the backward pass reads.

    Attributes:
        writes: [B, T, H, V], what the tokens write; empty without the delta rule, where that is their values.
        states: [B, H, chunks, V, K], the states before the chunks, transposed.
    """

    writes: jax.Array
    states: jax.Array


@forward_with_plain_states
@forward_with_split_values
def forward(
    record: LinearRecurrence, config: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DeltaResiduals | None]:
    """Returns output and final states of a record, and the private residuals for its gradients.

    Args:
        record: The canonical arguments.
        config: Unused: the kernel has no options.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states [B, H, K, V] in float32; no public residuals; the
        private ones, or None where no backward pass follows.
    """
    stores = is_differentiated()
    output, states, residuals = run_forward(record, stores=stores)
    return (output, states), (), residuals if stores else None


def run_forward(record: LinearRecurrence, *, stores: bool) -> tuple[jax.Array, jax.Array, DeltaResiduals]:
    """Returns output, final states and residuals, which are empty arrays unless the kernel stores them.

    Args:
        record: The canonical arguments.
        stores: Whether the kernel stores the residuals.
    """
    (rows, tokens, _, keys), heads, dtype = record.query.shape, num_state_heads(record), record.query.dtype
    columns = record.value.shape[3]
    segments = num_segments(record)
    token_shape, states_shape = (rows, tokens, heads, columns), (rows, heads, num_chunks(record), columns, keys)
    call = jax.ffi.ffi_call(
        register_handler(scan_handler("ejkernel_delta_rule", record, segments)),
        (
            jax.ShapeDtypeStruct(token_shape, dtype),
            jax.ShapeDtypeStruct(final_states_shape(record), jnp.float32),
            jax.ShapeDtypeStruct(token_shape if stores and record.beta is not None else (0,), dtype),
            jax.ShapeDtypeStruct(states_shape if stores else (0,), dtype),
            *segment_results(record, segments),
        ),
        # The leading axes of gates may have size 1, so arrays do not batch alike.
        vmap_method="sequential",
    )
    output, final_states, writes, chunk_states, *_ = call(
        *(record.query, record.key, record.value),
        *gates_and_beta(record),
        _float32_or_empty(starting_states(record)),
        *factors_and_skip(record),
        chunk_table(record),
        scale=np.float32(record.softmax_scale),
        segments=np.int32(segments),
    )
    return output, final_states, DeltaResiduals(writes, chunk_states)


def row_states(
    record: LinearRecurrence, output_cotangent: jax.Array | None, final_states_cotangent: jax.Array | None
) -> jax.Array | None:
    """Returns the states that the tokens of rows add to zeros, or the gradients of the states before them.

    Args:
        record: The canonical arguments of rows that are not packed, without the delta rule.
        output_cotangent: [B, T, H, V], of which the gradients are taken; None for the states.
        final_states_cotangent: None for zeros.

    Returns:
        [B, H, K, V] in float32, or None with states before or a cotangent after the rows.
    """
    if record.initial_state is not None or final_states_cotangent is not None:
        return None
    (rows, tokens, _, keys), heads, reverse = record.query.shape, num_state_heads(record), output_cotangent is not None
    read, value = (record.key, record.value) if output_cotangent is None else (record.query, output_cotangent)
    segments, state = num_segments_without_scan(tokens), (keys, value.shape[3])
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_row_states_reverse" if reverse else "ejkernel_row_states"),
        tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (
                (rows, heads, segments, SEGMENT_PARTS, *state),
                (rows, heads, segments, SEGMENT_PARTS + 1),
                (rows, segments, heads, *state),
            )
        ),
        vmap_method="sequential",
    )
    gates, factors = gates_and_beta(record)[0], factors_and_skip(record)[0]
    table = jnp.asarray(chunks_before_an_empty_segment(tokens, segments, reverse=reverse))
    dtype, scale = record.query.dtype, np.float32(record.softmax_scale)
    return call(read, value.astype(dtype), gates, factors, table, scale=scale)[2][:, -1]


def gates_and_beta(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
    """Returns log gates and beta, [B, T, H] in float32; an empty array for the one that a record does not have."""
    decay, shape = record.decay, (*record.query.shape[:2], num_state_heads(record))
    gates = None if decay is None else jnp.broadcast_to(decay[..., 0], shape)
    return _float32_or_empty(gates), _float32_or_empty(record.beta)


def factors_and_skip(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
    """Returns dt [B, T, H] and skip [H] in float32; an empty array for the one that a record does not have."""
    skip = None if record.skip is None else record.skip.reshape(num_state_heads(record))
    return _float32_or_empty(record.dt), _float32_or_empty(skip)


def _float32_or_empty(array: jax.Array | None) -> jax.Array:
    """Returns an array in float32; an empty one for None."""
    return jnp.zeros(0, jnp.float32) if array is None else array.astype(jnp.float32)
