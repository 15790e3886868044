"""The FFI calls of the forward pass with gates per key channel: one prepares chunks, and one scans them
(csrc/delta_rule/channel_gates.cu).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, final_states_shape, num_state_heads
from ejkernel.types.pullback import is_differentiated
from ejkernel_cuda.delta_rule.plan import (
    CHUNK,
    chunk_table,
    num_chunks,
    num_segments,
    scan_handler,
    starting_states,
)
from ejkernel_cuda.library import register_handler


class ScanResiduals(NamedTuple):
    """The results of the forward pass that the backward pass reads.

    Attributes:
        writes: [B, T, H, V], what the tokens write; empty without the delta rule, where that is their values.
        states: [B, H, chunks, V, K], the states before the chunks, transposed.
    """

    writes: jax.Array
    states: jax.Array


class PreparedChunks(NamedTuple):
    """What the scans read (csrc/delta_rule/channel_pairs.cuh).

    Attributes:
        decayed_query: [B, T, H, K], queries times the gates from their chunk's first token up to their own.
        key_to_end: [B, T, H, K], keys times the gates after their own token up to the chunk's last one.
        decayed_key: [B, T, H, K], keys times the same gates as the queries; empty without the delta rule.
        scores: [B, H, chunks, 64, 64], the decayed products of queries and keys of a chunk.
        inverse: [B, H, chunks, 64, 64], the inverse of the delta rule's system; empty without it.
        decay: [B, H, chunks, K] in float32, the product of a chunk's gates.
    """

    decayed_query: jax.Array
    key_to_end: jax.Array
    decayed_key: jax.Array
    scores: jax.Array
    inverse: jax.Array
    decay: jax.Array


def forward(
    record: LinearRecurrence, config: Any
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], ScanResiduals | None]:
    """Returns output and final states of a record, and the private residuals for its gradients.

    Args:
        record: The canonical arguments, with gates per key channel.
        config: Unused: the kernels have no options.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states [B, H, K, V] in float32; no public residuals; the
        private ones, or None where no backward pass follows.
    """
    stores = is_differentiated()
    output, states, residuals = run_forward(record, stores=stores)
    return (output, states), (), residuals if stores else None


def run_forward(record: LinearRecurrence, *, stores: bool) -> tuple[jax.Array, jax.Array, ScanResiduals]:
    """Returns output, final states and residuals, which are empty arrays unless the kernel stores them.

    Args:
        record: The canonical arguments, with gates per key channel.
        stores: Whether the kernel stores the residuals.
    """
    (rows, tokens, _, keys), heads, dtype = record.query.shape, num_state_heads(record), record.query.dtype
    columns = record.value.shape[3]
    segments = num_segments(record)
    token_shape, states_shape = (rows, tokens, heads, columns), (rows, heads, num_chunks(record), columns, keys)
    call = jax.ffi.ffi_call(
        register_handler(scan_handler("ejkernel_channel_scan", record, segments)),
        (
            jax.ShapeDtypeStruct(token_shape, dtype),
            jax.ShapeDtypeStruct(final_states_shape(record), jnp.float32),
            jax.ShapeDtypeStruct(token_shape if stores and record.beta is not None else (0,), dtype),
            jax.ShapeDtypeStruct(states_shape if stores else (0,), dtype),
            early_steps_result(record, segments),
        ),
        vmap_method="sequential",
    )
    output, final_states, writes, chunk_states, _ = call(
        *prepare_chunks(record),
        record.value,
        float32_or_empty(record.beta),
        float32_or_empty(starting_states(record)),
        chunk_table(record),
        scale=np.float32(record.softmax_scale),
        segments=np.int32(segments),
    )
    return output, final_states, ScanResiduals(writes, chunk_states)


def prepare_chunks(record: LinearRecurrence) -> PreparedChunks:
    """Returns what the scans read of a record."""
    (rows, tokens, _, keys), heads, dtype = record.query.shape, num_state_heads(record), record.query.dtype
    chunks, has_delta = num_chunks(record), record.beta is not None
    operand = jax.ShapeDtypeStruct((rows, tokens, heads, keys), dtype)
    pairs = jax.ShapeDtypeStruct((rows, heads, chunks, CHUNK, CHUNK), dtype)
    empty = jax.ShapeDtypeStruct((0,), dtype)
    decay = jax.ShapeDtypeStruct((rows, heads, chunks, keys), jnp.float32)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_channel_prepare"),
        (operand, operand, operand if has_delta else empty, pairs, pairs if has_delta else empty, decay),
        # The leading axes of gates may have size 1, so arrays do not batch alike.
        vmap_method="sequential",
    )
    fields = (record.query, record.key, log_gates(record), float32_or_empty(record.beta))
    return PreparedChunks(*call(*fields, chunk_table(record)))


def early_steps_result(record: LinearRecurrence, segments: int) -> jax.ShapeDtypeStruct:
    """Returns the result of a scan for the number of chunks before each segment at which it begins; empty without the
    delta rule.

    Args:
        record: The canonical arguments.
        segments: The number of segments of each row.
    """
    shape = (record.query.shape[0], num_state_heads(record), segments - 1, 2)
    return jax.ShapeDtypeStruct((0,) if record.beta is None or segments == 1 else shape, jnp.int32)


def log_gates(record: LinearRecurrence) -> jax.Array:
    """Returns the log gates of a record, [B, T, H, K] in float32."""
    shape = (*record.query.shape[:2], num_state_heads(record), record.query.shape[3])
    return jnp.broadcast_to(float32_or_empty(record.decay), shape)


def float32_or_empty(array: jax.Array | None) -> jax.Array:
    """Returns an array in float32; an empty one for None."""
    return jnp.zeros(0, jnp.float32) if array is None else array.astype(jnp.float32)
