"""Backward pass of the linear recurrence on TPUs.

state passing, forwards:   S_0 ─► chunk 0 ─► S_1 ─► chunk 1 ─► S_2 ...     stores the state before every chunk
gradients, in reverse:     ... dS_2 ─► chunk 1 ─► dS_1 ─► chunk 0 ─► dS_0  recomputes a chunk, then its gradients
"""

import functools

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, states
from ejkernel.families.linear_recurrence.plain_states import with_plain_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.linear_recurrence import plan as layout
from ejkernel_pallas.tpu.linear_recurrence.config import TpuRecurrence
from ejkernel_pallas.tpu.linear_recurrence.forward import inputs, run, token_arrays, unless_empty
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_bwd import chunk_bwd
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk_fwd import chunk_states
from ejkernel_pallas.tpu.linear_recurrence.plan import Plan, make_plan
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import Operand


@with_plain_state_gradients
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
    results = _run(pullback, plan, arrays, _chunk_states(plan, arrays, states(record)))
    first = unless_empty(record, results["initial"], pullback.cotangent[1].astype(jnp.float32))
    found = {"initial_state": first, "sequence_state": first}
    for name, count in plan.spec.wide:
        if f"of_{name}" in results:
            of_heads = layout.from_operand(plan, name, results[f"of_{name}"], _written(plan.spec, count))
            found[name] = plan.unalign(of_heads)
    if "of_columns" in results:
        of_columns = layout.column_gradients(plan, record, results["of_columns"], results.get("of_along"))
        found |= {name: plan.unalign(x) for name, x in of_columns.items()}
    return {name: _as_field(found[name], getattr(record, name)) for name in sorted(pullback.grad_fields)}


def _chunk_states(plan: Plan, arrays: dict[str, jax.Array], first: jax.Array) -> jax.Array:
    """Returns the states before every chunk, [B, chunks, H, K, V], from the initial states."""
    spec = plan.spec
    shape = (plan.rows, plan.chunks, spec.total_heads, spec.keys, spec.values)
    results = run(
        "chunk_states",
        chunk_states,
        plan,
        inputs={**inputs(plan, arrays), "initial": layout.states_operand(plan, first, False)},
        outputs={"chunk_states": layout.chunk_states_operand(plan, jax.ShapeDtypeStruct(shape, jnp.float32), False)},
    )
    return results["chunk_states"]


def _run(pullback: Pullback, plan: Plan, arrays: dict[str, jax.Array], before: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradients that the kernel writes, and those of the initial states as `initial`."""
    record, (read, final), spec = pullback.record, pullback.cotangent, plan.spec
    read = plan.align(read)
    grad_fields = frozenset(pullback.grad_fields)
    outputs: dict[str, Operand] = {}
    for name, count in spec.wide:
        if name in grad_fields:
            written = _written(spec, count)
            # What XLA adds up afterwards is in float32.
            dtype = getattr(record, name).dtype if written == count else jnp.float32
            results = jax.ShapeDtypeStruct((plan.rows, plan.length, written, spec.width(name)), dtype)
            outputs[f"of_{name}"] = layout.wide_operand(plan, name, results, written, True)
    of_decay = bool(spec.sums) and "decay" in grad_fields
    if of_decay or grad_fields & set(spec.columns):
        results = (plan.rows, spec.steps, plan.length, layout.column_count(spec))
        outputs["of_columns"] = layout.columns_operand(plan, jax.ShapeDtypeStruct(results, jnp.float32), True)
    if of_decay:
        results = (plan.rows, spec.steps, plan.chunks, spec.heads, spec.chunk)
        outputs["of_along"] = layout.rows_operand(plan, jax.ShapeDtypeStruct(results, jnp.float32), True)
    outputs["initial"] = layout.states_operand(plan, jax.ShapeDtypeStruct(final.shape, jnp.float32), True)
    return run(
        "chunk_bwd",
        functools.partial(chunk_bwd, grad_fields=grad_fields),
        plan,
        inputs={
            **inputs(plan, arrays, backwards=True),
            "cotangent": layout.wide_operand(plan, "output", read, spec.total_heads, True),
            "final": layout.states_operand(plan, final.astype(jnp.float32), True),
            "chunk_states": layout.chunk_states_operand(plan, before, True),
        },
        outputs=outputs,
    )


def _written(spec: RecurrenceSpec, count: int) -> int:
    """Returns heads of the gradient of a field: its own, or one per step if several steps read a head."""
    return count if spec.heads * count >= spec.total_heads else spec.steps


def _as_field(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Returns a gradient in the shape and dtype of its field: summed over the axes that the field broadcasts along."""
    if gradient.ndim < field.ndim:
        gradient = gradient[..., None]
    if gradient.shape[2] != field.shape[2]:  # heads of the steps that read the same head
        gradient = gradient.reshape(*gradient.shape[:2], field.shape[2], -1, *gradient.shape[3:]).sum(axis=3)
    shared = tuple(n for n, size in enumerate(field.shape) if size == 1 and gradient.shape[n] > 1)
    return gradient.sum(axis=shared, keepdims=True).astype(field.dtype)
