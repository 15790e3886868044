"""Forward pass of the delta rule in Triton: corrections of all chunks, the states between them, then their outputs."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.planning import packing
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence import stages
from ejkernel_triton.linear_recurrence.config import ChunkPasses
from ejkernel_triton.linear_recurrence.forward import initial_states
from ejkernel_triton.linear_recurrence.spec import Call, state_dtype


def forward(record: LinearRecurrence, config: ChunkPasses) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Output and final states of a record with beta and a gate a head.

    Args:
        record: The canonical arguments.
        config: Chunks and tiles; its fields for gradients and segments are not read.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32; no residuals.
    """
    assert record.beta is not None  # `Requires` saw to it
    # A correction is no decay: what a segment does to its first state is a matrix, so rows are not split.
    config = dataclasses.replace(config, splits=1)
    call = stages.make_call(record, config, config.chunk)
    written, correction = corrections(call, record.beta)
    states, final, value = stages.pass_states(
        call, record.key, written, initial_states(record), dtype=state_dtype(record), correction=correction
    )
    output = stages.make_outputs(dataclasses.replace(call, value=value), states)
    if record.cu_seqlens is None:
        return (output, final[:, -1]), ()
    owned = packing.packed_ids(record.cu_seqlens, call.spec.T)[0][0] >= 0
    return (jnp.where(owned[None, :, None, None], output, 0), final[0]), ()


def corrections(call: Call, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What tokens write apart from what the state before their chunk answers, and what takes that from it.

    Args:
        call: What the stages share.
        beta: [B, T, H].

    Returns:
        U [B, T, H, V] and W [B, T, H, K] in the dtypes of value and key: with S the state before its chunk, a token
        writes U - W S.
    """
    from ejkernel_triton.linear_recurrence.delta_kernel import corrections_kernel

    spec, config, batch = call.spec, call.config, call.query.shape[0]
    written, correction = launch(
        corrections_kernel,
        (call.key, call.value, call.gates, beta, *call.spans),
        [
            Shape((batch, spec.T, spec.H, spec.V), call.value.dtype),
            Shape((batch, spec.T, spec.H, spec.K), call.key.dtype),
        ],
        batch=batch,
        grid=batch * spec.CHUNKS * spec.H,
        num_warps=config.score_warps,
        num_stages=config.score_stages,
        constants={"spec": spec, "BLOCK_K": config.score_block_k, "BLOCK_V": config.output_block_v},
    )
    return written, correction
