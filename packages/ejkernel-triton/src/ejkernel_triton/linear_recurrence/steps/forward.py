"""A linear recurrence in Triton, token by token: the bits of a token do not depend on the rest of a call."""

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads, real_and_segment_start_tokens
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.linear_recurrence.decode.config import num_states
from ejkernel_triton.linear_recurrence.steps.config import StepTile
from ejkernel_triton.linear_recurrence.steps.spec import make_spec


def forward(record: LinearRecurrence, config: StepTile) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    States in float32, and slots of any dtype, are updated in place: XLA copies them first only if they are used
    elsewhere, for example by a caller that does not donate them.

    Args:
        record: The canonical arguments.
        config: The tile.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32, or the slots; no residuals.
    """
    from ejkernel_triton.linear_recurrence.steps.kernels.token_scan import token_scan_kernel

    spec, rows, inputs = make_spec(record, config), record.query.shape[0], _kernel_inputs(record)
    final_states, output = launch(
        token_scan_kernel,
        inputs,
        # The index of an input means that the output is written to its memory.
        (len(inputs) - 1, ShapeDtype((rows, spec.T, spec.H, spec.V), record.query.dtype)),
        batch=rows,
        grid=rows * spec.NUM_SEQUENCES * spec.H * spec.NUM_VALUE_TILES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return (output, final_states[0] if spec.IS_PACKED else final_states), ()


def _kernel_inputs(record: LinearRecurrence) -> tuple[jax.Array | None, ...]:
    """Returns the kernel's inputs: tokens' fields, roles (0 is padding, 2 begins a segment), bounds and states."""
    roles, slots = None, None
    if record.segment_ids is not None:
        is_token, starts_from_zero = real_and_segment_start_tokens(record.segment_ids)
        roles = jnp.where(is_token, 1 + starts_from_zero.astype(jnp.int32), 0)
    bounds = jnp.array([[0, record.query.shape[1]]], jnp.int32)
    if record.cu_seqlens is not None:
        bounds = record.cu_seqlens.astype(jnp.int32)[None]
        slots = None if record.state_slots is None else record.state_slots[None]
    decay = record.decay
    if decay is not None and decay.shape[3] == 1:
        decay = _widen(decay)
    fields = (record.query, record.key, record.value, decay, record.value_decay, _widen(record.beta))
    vectors = (record.low_rank_write, record.low_rank_read)
    return (*fields, _widen(record.dt), record.skip, *vectors, roles, bounds, slots, _initial_states(record))


def _widen(x: jax.Array | None) -> jax.Array | None:
    """Returns one number per token in float32: asynchronous copies have at least four bytes."""
    return None if x is None else x.astype(jnp.float32)


def _initial_states(record: LinearRecurrence) -> jax.Array:
    """Returns the states that the kernel updates, with an axis of rows: slots as they are, or states in float32."""
    packed = record.cu_seqlens is not None
    states = record.sequence_state if packed else record.initial_state
    if states is None:
        channels = (record.query.shape[3], record.value.shape[3])
        heads = num_state_heads(record)
        shape = channels[::-1] if record.transposed_states else channels
        states = jnp.zeros((num_states(record) // heads, heads, *shape), jnp.float32)
    elif record.state_slots is None:
        states = states.astype(jnp.float32)
    return states[None] if packed else states
