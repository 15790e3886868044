"""Forward pass of recurrences with a low-rank term: the transitions of all chunks, then a scan of the states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.chunked.forward import initial_states, zero_padding
from ejkernel_triton.linear_recurrence.low_rank.config import LowRankConfig
from ejkernel_triton.linear_recurrence.low_rank.plan import LowRankCall, make_call
from ejkernel_triton.linear_recurrence.spec import state_dtype


class ChunkTransitions(NamedTuple):
    """What each chunk does to the state, and what its tokens read of it. Channels are padded to powers of two.

    With S the state before a chunk, its outputs are `state_readers S + intra_chunk_outputs`, and the state after it is
    `exp2(log2_chunk_decay) S + state_products S + state_writes`.

    Attributes:
        log2_chunk_decay: [B, H, NUM_CHUNKS, K] float32.
        state_readers: [B, H, NUM_CHUNKS, CHUNK_SIZE, K], times the output's scale.
        intra_chunk_outputs: [B, H, NUM_CHUNKS, CHUNK_SIZE, V], times the output's scale.
        state_products: [B, H, NUM_CHUNKS, K, K].
        state_writes: [B, H, NUM_CHUNKS, K, V].
        inverse: [B, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE], the inverse of I minus the pairs of read and write
            vectors; undefined unless it is stored.
    """

    log2_chunk_decay: jax.Array
    state_readers: jax.Array
    intra_chunk_outputs: jax.Array
    state_products: jax.Array
    state_writes: jax.Array
    inverse: jax.Array


class LowRankResiduals(NamedTuple):
    """The arrays that the forward pass stores for the backward pass; see `ChunkTransitions`.

    Attributes:
        log2_chunk_decay: Sums of the gates of chunks.
        state_readers: Vectors that read the state before a chunk.
        state_products: Matrices that a chunk multiplies the state with, in addition to decay.
        inverse: The inverses.
        states: [B, H, NUM_CHUNKS, K, V], the states before the chunks.
    """

    log2_chunk_decay: jax.Array
    state_readers: jax.Array
    state_products: jax.Array
    inverse: jax.Array
    states: jax.Array


@forward_with_plain_states
def forward(
    record: LinearRecurrence, config: LowRankConfig
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], LowRankResiduals | None]:
    """Returns output and final states of a record with a low-rank term, and the private residuals for its gradients.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles of both passes.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no public residuals; the private
        residuals, None unless a backward pass follows.
    """
    dtype, call = record.query.dtype, make_call(record, config)
    stores_residuals = is_differentiated()
    output, final_states, residuals = run_chunks(call, store_residuals=stores_residuals)
    output = output.astype(dtype)  # in Triton's interpreter, calls may have another dtype
    if record.cu_seqlens is None:
        return (output, final_states[:, -1]), (), residuals if stores_residuals else None
    # No chunk contains padding tokens, so no program writes their outputs.
    output = zero_padding(output, call.chunk_tables)
    return (output, final_states[0]), (), residuals if stores_residuals else None


def run_chunks(call: LowRankCall, *, store_residuals: bool) -> tuple[jax.Array, jax.Array, LowRankResiduals]:
    """Returns outputs, final states [B, NUM_SEQUENCES, H, K, V], and residuals, of which inverses and states are
    undefined unless they are stored.
    """
    transitions = chunk_transitions(call, store_inverse=store_residuals)
    output, final_states, states = scan_transitions(call, transitions, store_states=store_residuals)
    residuals = LowRankResiduals(
        transitions.log2_chunk_decay,
        transitions.state_readers,
        transitions.state_products,
        transitions.inverse,
        states,
    )
    return output, final_states, residuals


def chunk_transitions(call: LowRankCall, *, store_inverse: bool) -> ChunkTransitions:
    """Computes the transitions of all chunks.

    Args:
        call: What the launches of the call share.
        store_inverse: Whether the inverse is stored for the backward pass.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import chunk_transitions_kernel

    record, spec, dtype = call.record, call.spec, call.record.query.dtype
    batch, chunk, block_k, block_v = record.query.shape[0], spec.CHUNK_SIZE, call.block_k, call.block_v
    inverse_shape = (batch, spec.H, spec.NUM_CHUNKS * chunk, chunk) if store_inverse else (batch,)
    outputs = launch(
        chunk_transitions_kernel,
        (
            *call.token_arrays,
            call.gate_sum_matrices,
            *call.chunk_tables.chunk_kernel_inputs,
        ),
        [
            ShapeDtype((batch, spec.H, spec.NUM_CHUNKS, block_k), jnp.float32),
            ShapeDtype(call.chunk_blocks(chunk, block_k), dtype),
            ShapeDtype(call.chunk_blocks(chunk, block_v), dtype),
            ShapeDtype(call.chunk_blocks(block_k, block_k), dtype),
            ShapeDtype(call.chunk_blocks(block_k, block_v), state_dtype(record)),
            ShapeDtype(inverse_shape, dtype),
        ],
        **call.chunk_options,
        constants={**call.chunk_constants, "STORE_INVERSE": store_inverse},
    )
    return ChunkTransitions(*outputs)


def scan_transitions(
    call: LowRankCall, transitions: ChunkTransitions, *, store_states: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs [B, T, H, V], undefined for padding tokens; final states [B, NUM_SEQUENCES, H, K, V] float32; and
    the states before the chunks, [B, H, NUM_CHUNKS, K, V] with padded channels, undefined unless they are stored.
    """
    from ejkernel_triton.linear_recurrence.low_rank.kernels.transition_scan import transition_scan_kernel

    record, spec, batch = call.record, call.spec, call.record.query.shape[0]
    states_shape = call.chunk_blocks(call.block_k, call.block_v) if store_states else (batch,)
    initial = initial_states(record)
    output, final_states, states = launch(
        transition_scan_kernel,
        (*transitions[:-1], initial, *call.chunk_tables.scan_kernel_inputs),
        [
            ShapeDtype((batch, spec.T, spec.H, spec.V), record.query.dtype),
            ShapeDtype((batch, spec.NUM_SEQUENCES, spec.H, spec.K, spec.V), jnp.float32),
            ShapeDtype(states_shape, state_dtype(record)),
        ],
        **call.scan_options,
        constants={
            **call.block_constants,
            "TILE_V": call.scan_block_v,
            "HAS_INITIAL_STATES": initial is not None,
            "STORE_CHUNK_STATES": store_states,
        },
    )
    return output, final_states, states
