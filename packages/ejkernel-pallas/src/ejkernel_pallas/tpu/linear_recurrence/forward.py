"""Forward pass of the linear recurrence on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.linear_recurrence import LinearRecurrence, in_slots, states
from ejkernel.families.linear_recurrence.plain_states import with_plain_states
from ejkernel_pallas.tpu.linear_recurrence import plan as layout
from ejkernel_pallas.tpu.linear_recurrence.config import TpuRecurrence
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_fwd import chunk_fwd
from ejkernel_pallas.tpu.linear_recurrence.kernels.refs import RecurrenceRefs
from ejkernel_pallas.tpu.linear_recurrence.plan import Plan, make_plan
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
    updates_slots = in_slots(record) is not None and not record.transposed_states
    return _update_slots(record, config) if updates_slots else _forward(record, config)


def _update_slots(record: LinearRecurrence, config: TpuRecurrence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns the output, and the slots after the packed sequences that have one."""
    return _run_forward(record, config, record.sequence_state), ()


@with_plain_states
def _forward(record: LinearRecurrence, config: TpuRecurrence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record with plain states."""
    first = states(record)
    output, final = _run_forward(record, config, first)
    return (output, unless_empty(record, final, first)), ()


def _run_forward(record: LinearRecurrence, config: TpuRecurrence, first: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the output, and the array of states after the kernel, whose memory is that of `first` if it is slots."""
    plan = make_plan(record, make_spec(record, config))
    spec = plan.spec
    shape = (plan.rows, plan.length, spec.total_heads, spec.values)
    output = jax.ShapeDtypeStruct(shape, record.query.dtype)
    final = jax.ShapeDtypeStruct(first.shape, first.dtype if plan.in_slots else jnp.float32)
    results = run(
        "chunk_fwd",
        functools.partial(chunk_fwd, in_slots=plan.in_slots),
        plan,
        inputs={**inputs(plan, token_arrays(plan, record)), "initial": layout.states_operand(plan, first, False)},
        outputs={
            "output": layout.wide_operand(plan, "output", output, spec.total_heads, False),
            "final": layout.states_operand(plan, final, False),
        },
        aliases={"initial": "final"} if plan.in_slots else {},
        chunks=None if plan.token_positions is None else plan.token_positions.num_used_chunks,
    )
    read = layout.from_operand(plan, "output", results["output"], spec.total_heads)
    return plan.unalign(read), results["final"]


def token_arrays(plan: Plan, record: LinearRecurrence) -> dict[str, jax.Array]:
    """Returns all kernels' inputs from a record's tokens, by the names of their refs."""
    shape = record.query.shape[:2]
    found: dict[str, jax.Array] = {}
    for name, _ in plan.spec.wide:
        x = getattr(record, name)
        found[name] = plan.align(jnp.broadcast_to(x, (*shape, *x.shape[2:])))
    if plan.spec.columns or plan.spec.runs:
        found["columns"], along = layout.columns(plan, record)
        found |= {} if along is None else {"along": along}
    return found


def inputs(plan: Plan, arrays: dict[str, jax.Array], *, backwards: bool = False) -> dict[str, Operand]:
    """Returns those arrays as operands of a kernel."""
    counts = dict(plan.spec.wide)
    found = {name: layout.wide_operand(plan, name, arrays[name], counts[name], backwards) for name in counts}
    if "columns" in arrays:
        found["columns"] = layout.columns_operand(plan, arrays["columns"], backwards)
    if "along" in arrays:
        found["along"] = layout.rows_operand(plan, arrays["along"], backwards)
    return found


def run(
    name: str,
    kernel: Any,
    plan: Plan,
    *,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    aliases: dict[str, str] | None = None,
    chunks: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Runs one of the kernels on all chunks, or on the first `chunks` of them."""
    spec = plan.spec
    scratch = {"state": pltpu.VMEM((spec.heads, spec.keys, spec.values), jnp.float32)}
    return launch(
        KernelCall(
            name=f"ejkernel_linear_recurrence_{name}",
            kernel=functools.partial(kernel, spec=spec, chunks=plan.chunks, packed=plan.token_positions is not None),
            refs=RecurrenceRefs,
            grid=(plan.rows, spec.steps, plan.chunks if chunks is None else chunks),
            # Rows and heads are parallel; the chunks of a row are sequential.
            parallel=2,
            tables={"table": plan.table},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            aliases=aliases or {},
        )
    )


def unless_empty(record: LinearRecurrence, found: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Returns the states of sequences; those without tokens, for which no step writes a state, keep `otherwise`."""
    if record.cu_seqlens is None:
        return found
    is_empty = jnp.diff(record.cu_seqlens) == 0
    return jnp.where(is_empty[:, None, None, None], otherwise, found)
