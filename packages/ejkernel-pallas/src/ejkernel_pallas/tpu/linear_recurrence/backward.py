"""Backward pass of the linear recurrence on TPUs.

state passing, forwards:   S_0 ─► chunk 0 ─► S_1 ─► chunk 1 ─► S_2 ...     stores the state before every chunk
gradients, in reverse:     ... dS_2 ─► chunk 1 ─► dS_1 ─► chunk 0 ─► dS_0  recomputes a chunk, then its gradients
"""

import functools

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, states
from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.linear_recurrence import plan as layout
from ejkernel_pallas.tpu.linear_recurrence.config import TpuRecurrence
from ejkernel_pallas.tpu.linear_recurrence.forward import (
    keep_states_of_empty_sequences,
    run,
    token_arrays,
    token_operands,
)
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_bwd import chunk_bwd
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_fwd import store_chunk_states
from ejkernel_pallas.tpu.linear_recurrence.plan import ChunkPlan, make_plan
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import Operand


@backward_with_plain_states
def backward(pullback: Pullback, config: TpuRecurrence) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, and the names of the requested fields.
        config: Chunks, and heads per step.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: LinearRecurrence = pullback.record
    plan = make_plan(record, make_spec(record, config))
    arrays = token_arrays(plan, record)
    results = _run(pullback, plan, arrays, _states_before_chunks(plan, arrays, states(record)))
    first = keep_states_of_empty_sequences(record, results["initial_state"], pullback.cotangent[1].astype(jnp.float32))
    found = {"initial_state": first, "sequence_state": first}
    for name, count in plan.spec.channel_field_head_counts:
        if f"d{name}" in results:
            of_heads = layout.unpack_channel_result(
                plan, name, results[f"d{name}"], _num_gradient_heads(plan.spec, count)
            )
            found[name] = plan.gather_from_chunks(of_heads)
    if "dscalar_columns" in results:
        dscalar_columns = layout.scalar_gradients(plan, record, results["dscalar_columns"], results.get("dscalar_rows"))
        found |= {name: plan.gather_from_chunks(x) for name, x in dscalar_columns.items()}
    return {name: _reduce_to_field_shape(found[name], getattr(record, name)) for name in sorted(pullback.grad_fields)}


def _states_before_chunks(plan: ChunkPlan, arrays_by_ref: dict[str, jax.Array], initial_states: jax.Array) -> jax.Array:
    """Returns the states before every chunk, [B, chunks, H, K, V], from the initial states."""
    spec = plan.spec
    shape = (plan.batch_size, plan.chunks_per_row, spec.total_heads, spec.key_dim, spec.value_dim)
    results = run(
        "chunk_states",
        store_chunk_states,
        plan,
        inputs={
            **token_operands(plan, arrays_by_ref),
            "initial_state": layout.sequence_states_operand(plan, initial_states, False),
        },
        outputs={"chunk_states": layout.chunk_states_operand(plan, jax.ShapeDtypeStruct(shape, jnp.float32), False)},
    )
    return results["chunk_states"]


def _run(
    pullback: Pullback, plan: ChunkPlan, arrays_by_ref: dict[str, jax.Array], states_before_chunks: jax.Array
) -> dict[str, jax.Array]:
    """Returns the gradients that the kernel writes, and those of the initial states as `initial_state`."""
    record, (output_cotangent, final), spec = pullback.record, pullback.cotangent, plan.spec
    output_cotangent = plan.gather_to_chunks(output_cotangent)
    grad_fields = frozenset(pullback.grad_fields)
    outputs: dict[str, Operand] = {}
    for name, count in spec.channel_field_head_counts:
        if name in grad_fields:
            written = _num_gradient_heads(spec, count)
            # What XLA adds up afterwards is in float32.
            dtype = getattr(record, name).dtype if written == count else jnp.float32
            results = jax.ShapeDtypeStruct(
                (plan.batch_size, plan.padded_tokens_per_row, written, spec.num_channels(name)), dtype
            )
            outputs[f"d{name}"] = layout.channel_field_operand(plan, name, results, written, True)
    needs_decay_gradient = bool(spec.gate_sum_names) and "decay" in grad_fields
    if needs_decay_gradient or grad_fields & set(spec.scalar_names):
        results = (plan.batch_size, spec.num_head_steps, plan.padded_tokens_per_row, layout.num_scalar_columns(spec))
        outputs["dscalar_columns"] = layout.scalar_columns_operand(
            plan, jax.ShapeDtypeStruct(results, jnp.float32), True
        )
    if needs_decay_gradient:
        results = (plan.batch_size, spec.num_head_steps, plan.chunks_per_row, spec.heads_per_step, spec.chunk_tokens)
        outputs["dscalar_rows"] = layout.scalar_rows_operand(plan, jax.ShapeDtypeStruct(results, jnp.float32), True)
    outputs["initial_state"] = layout.sequence_states_operand(
        plan, jax.ShapeDtypeStruct(final.shape, jnp.float32), True
    )
    return run(
        "chunk_bwd",
        functools.partial(chunk_bwd, grad_fields=grad_fields),
        plan,
        inputs={
            **token_operands(plan, arrays_by_ref, reverses_chunks=True),
            "cotangent": layout.channel_field_operand(plan, "output", output_cotangent, spec.total_heads, True),
            "final_state": layout.sequence_states_operand(plan, final.astype(jnp.float32), True),
            "chunk_states": layout.chunk_states_operand(plan, states_before_chunks, True),
        },
        outputs=outputs,
    )


def _num_gradient_heads(spec: RecurrenceSpec, num_field_heads: int) -> int:
    """Returns the number of heads of the gradient of a field: its own, or one per step if several steps read a head."""
    return num_field_heads if spec.heads_per_step * num_field_heads >= spec.total_heads else spec.num_head_steps


def _reduce_to_field_shape(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Returns a gradient in the shape and dtype of its field: summed over the axes that the field broadcasts along."""
    if gradient.ndim < field.ndim:
        gradient = gradient[..., None]
    if gradient.shape[2] != field.shape[2]:  # heads of the steps that read the same head
        gradient = gradient.reshape(*gradient.shape[:2], field.shape[2], -1, *gradient.shape[3:]).sum(axis=3)
    shared = tuple(n for n, size in enumerate(field.shape) if size == 1 and gradient.shape[n] > 1)
    return gradient.sum(axis=shared, keepdims=True).astype(field.dtype)
