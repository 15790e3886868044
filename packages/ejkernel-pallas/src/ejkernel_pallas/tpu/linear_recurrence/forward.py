"""Forward pass of the linear recurrence on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.linear_recurrence import LinearRecurrence, states
from ejkernel.families.linear_recurrence.plain_states import forward_with_plain_states
from ejkernel_pallas.tpu.linear_recurrence import plan as layout
from ejkernel_pallas.tpu.linear_recurrence.config import MIN_CHUNK_TOKENS, TpuRecurrence, updates_slots
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_fwd import chunk_fwd
from ejkernel_pallas.tpu.linear_recurrence.kernels.recurrent_step import StepRefs, recurrent_step
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import RecurrenceRefs
from ejkernel_pallas.tpu.linear_recurrence.plan import ChunkPlan, make_plan
from ejkernel_pallas.tpu.linear_recurrence.spec import make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch


def forward(record: LinearRecurrence, config: TpuRecurrence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Chunks, and heads per step.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states in float32, or the slots that hold them, updated in
        place. There are no residuals: the backward pass recomputes the states between chunks.
    """
    if updates_slots(record):
        return _forward_with_state_slots(record, config)
    return _forward_from_plain_states(record, config)


def _forward_with_state_slots(
    record: LinearRecurrence, config: TpuRecurrence
) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output, and the slots after the packed sequences that have one."""
    plan = make_plan(record, make_spec(record, config))
    run_kernel = _run_steps if plan.spec.chunk_tokens < MIN_CHUNK_TOKENS else _run_chunks
    return run_kernel(plan, record, record.sequence_state), ()


@forward_with_plain_states
def _forward_from_plain_states(
    record: LinearRecurrence, config: TpuRecurrence
) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record with plain states."""
    first = states(record)
    output, final = _run_chunks(make_plan(record, make_spec(record, config)), record, first)
    return (output, keep_states_of_empty_sequences(record, final, first)), ()


def _run_steps(plan: ChunkPlan, record: LinearRecurrence, slots: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the slots after the kernel that computes token by token."""
    spec = plan.spec
    shape = (plan.padded_tokens_per_row, spec.total_heads, spec.value_dim)
    output = jax.ShapeDtypeStruct((1, *shape), record.query.dtype)
    arrays = channel_arrays(plan, record)
    inputs = {
        name: layout.step_field_operand(plan, name, arrays[name], count)
        for name, count in spec.channel_field_head_counts
    }
    if spec.step_scalar_names:
        inputs["scalars"] = layout.step_scalars_operand(plan, record)
    final = jax.ShapeDtypeStruct(slots.shape, slots.dtype)
    results = run(
        "recurrent_step",
        functools.partial(recurrent_step, states_in_slots=True),
        plan,
        inputs={**inputs, "initial_state": layout.sequence_states_operand(plan, slots, False)},
        outputs={
            "output": layout.step_field_operand(plan, "output", output, spec.total_heads),
            "final_state": layout.sequence_states_operand(plan, final, False),
        },
        aliases={"initial_state": "final_state"},
        num_chunks=None if plan.token_positions is None else plan.token_positions.num_used_chunks,
        refs=StepRefs,
    )
    return plan.gather_from_chunks(results["output"].reshape(1, *shape)), results["final_state"]


def _run_chunks(plan: ChunkPlan, record: LinearRecurrence, initial_states: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the output, and the array of states after the kernel, whose memory is that of `initial_states` if it is
    slots.
    """
    spec = plan.spec
    shape = (plan.batch_size, plan.padded_tokens_per_row, spec.total_heads, spec.value_dim)
    output = jax.ShapeDtypeStruct(shape, record.query.dtype)
    final = jax.ShapeDtypeStruct(initial_states.shape, initial_states.dtype if plan.states_in_slots else jnp.float32)
    results = run(
        "chunk_fwd",
        functools.partial(chunk_fwd, states_in_slots=plan.states_in_slots),
        plan,
        inputs={
            **token_operands(plan, token_arrays(plan, record)),
            "initial_state": layout.sequence_states_operand(plan, initial_states, False),
        },
        outputs={
            "output": layout.channel_field_operand(plan, "output", output, spec.total_heads, False),
            "final_state": layout.sequence_states_operand(plan, final, False),
        },
        aliases={"initial_state": "final_state"} if plan.states_in_slots else {},
        num_chunks=None if plan.token_positions is None else plan.token_positions.num_used_chunks,
    )
    read = layout.unpack_channel_result(plan, "output", results["output"], spec.total_heads)
    return plan.gather_from_chunks(read), results["final_state"]


def channel_arrays(plan: ChunkPlan, record: LinearRecurrence) -> dict[str, jax.Array]:
    """Returns the fields that have channels, [B, T', heads, channels]."""
    shape = record.query.shape[:2]
    found: dict[str, jax.Array] = {}
    for name, _ in plan.spec.channel_field_head_counts:
        x = getattr(record, name)
        full = (*shape, x.shape[2], plan.spec.num_channels(name))
        found[name] = plan.gather_to_chunks(jnp.broadcast_to(x, full))
    return found


def token_arrays(plan: ChunkPlan, record: LinearRecurrence) -> dict[str, jax.Array]:
    """Returns the inputs of the kernels that compute chunks, from a record's tokens, by the names of their refs."""
    found = channel_arrays(plan, record)
    if plan.spec.scalar_names or plan.spec.has_segment_runs:
        found["scalar_columns"], scalar_rows = layout.make_scalar_arrays(plan, record)
        found |= {} if scalar_rows is None else {"scalar_rows": scalar_rows}
    return found


def token_operands(
    plan: ChunkPlan, arrays_by_ref: dict[str, jax.Array], *, reverses_chunks: bool = False
) -> dict[str, Operand]:
    """Returns the arrays of `token_arrays` as operands of a kernel."""
    counts = dict(plan.spec.channel_field_head_counts)
    found = {
        name: layout.channel_field_operand(plan, name, arrays_by_ref[name], counts[name], reverses_chunks)
        for name in counts
    }
    if "scalar_columns" in arrays_by_ref:
        found["scalar_columns"] = layout.scalar_columns_operand(plan, arrays_by_ref["scalar_columns"], reverses_chunks)
    if "scalar_rows" in arrays_by_ref:
        found["scalar_rows"] = layout.scalar_rows_operand(plan, arrays_by_ref["scalar_rows"], reverses_chunks)
    return found


def run(
    name: str,
    kernel: Any,
    plan: ChunkPlan,
    *,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    aliases: dict[str, str] | None = None,
    num_chunks: jax.Array | None = None,
    refs: type[Any] = RecurrenceRefs,
) -> dict[str, jax.Array]:
    """Runs one of the kernels on all chunks, or on the first `num_chunks` of them."""
    spec = plan.spec
    scratch = {"state": pltpu.VMEM((spec.heads_per_step, spec.key_dim, spec.value_dim), jnp.float32)}
    return launch(
        KernelCall(
            name=f"ejkernel_linear_recurrence_{name}",
            kernel=functools.partial(
                kernel, spec=spec, chunks_per_row=plan.chunks_per_row, is_packed=plan.token_positions is not None
            ),
            refs=refs,
            grid=(plan.batch_size, spec.num_head_steps, plan.chunks_per_row if num_chunks is None else num_chunks),
            # Rows and heads are parallel; the chunks of a row are sequential.
            num_parallel_axes=2,
            scalar_tables={"chunk_table": plan.chunk_table},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            aliases=aliases or {},
        )
    )


def keep_states_of_empty_sequences(
    record: LinearRecurrence, final_states: jax.Array, initial_states: jax.Array
) -> jax.Array:
    """Returns final states, with the initial states of sequences without tokens, which no step writes."""
    if record.cu_seqlens is None:
        return final_states
    is_empty = jnp.diff(record.cu_seqlens) == 0
    return jnp.where(is_empty[:, None, None, None], initial_states, final_states)
