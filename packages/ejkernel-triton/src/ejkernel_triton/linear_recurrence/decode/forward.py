"""The decode step of a linear recurrence in Triton: one to eight tokens per sequence, the state updated in place."""

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, real_and_segment_start_tokens, unchanged_states
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.decode.config import DecodeTile
from ejkernel_triton.linear_recurrence.decode.spec import make_spec


def forward(record: LinearRecurrence, config: DecodeTile) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    States in float32, and slots of any dtype, are updated in place: XLA copies them first only if they are used
    elsewhere, for example by a caller that does not donate them.

    Args:
        record: The canonical arguments.
        config: The tile.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32, or the slots; no residuals. Of trees the
        states after all tokens, in float32, or those before the tokens.
    """
    from ejkernel_triton.linear_recurrence.decode.kernels.fused_recurrent import fused_recurrent_kernel

    spec, rows = make_spec(record, config), record.query.shape[0]
    inputs, state = _kernel_inputs(record), (spec.V, spec.K) if spec.STATE_IS_TRANSPOSED else (spec.K, spec.V)
    final_shape = (rows, spec.NUM_SEQUENCES, spec.H, *state) if spec.IS_PACKED else (rows, spec.H, *state)
    if spec.HAS_TREES:
        final_shape = (rows, spec.T, spec.H, *state) if spec.STORES_TOKEN_STATES else (rows, 1)
    final_states, output = launch(
        fused_recurrent_kernel,
        inputs,
        (
            # The index of an input means that the output is written to its memory.
            len(inputs) - 1 if spec.STATES_ARE_IN_PLACE else ShapeDtype(final_shape, jnp.float32),
            ShapeDtype((rows, spec.T, spec.H, spec.V), record.query.dtype),
        ),
        batch=rows,
        grid=rows * spec.NUM_SEQUENCES * spec.H * spec.NUM_VALUE_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    if spec.HAS_TREES:
        return (output, final_states if spec.STORES_TOKEN_STATES else unchanged_states(record)), ()
    return (output, final_states[0] if spec.IS_PACKED else final_states), ()


def _kernel_inputs(record: LinearRecurrence) -> tuple[jax.Array | None, ...]:
    """Returns the kernel's inputs: tokens' fields, their roles (0 is padding, 2 begins a segment), and states."""
    roles, parents, cu_seqlens, slots, initial_states = None, None, None, None, record.initial_state
    if record.segment_ids is not None:
        is_token, starts_from_zero = real_and_segment_start_tokens(record.segment_ids)
        roles = jnp.where(is_token, 1 + starts_from_zero.astype(jnp.int32), 0)
    if record.parents is not None:
        parents = record.parents.astype(jnp.int32)
    if record.cu_seqlens is not None:
        cu_seqlens = record.cu_seqlens.astype(jnp.int32)[None]
        initial_states = None if record.sequence_state is None else record.sequence_state[None]
        slots = None if record.state_slots is None else record.state_slots[None]
    tokens = (record.query, record.key, record.value, record.decay, record.value_decay, record.beta, record.dt)
    return (*tokens, record.skip, roles, parents, cu_seqlens, slots, initial_states)
