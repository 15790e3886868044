"""Backward pass of the selective scan on TPUs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import with_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.selective_scan.config import TpuScan
from ejkernel_pallas.tpu.selective_scan.forward import (
    Blocks,
    chunk_operand,
    inputs,
    number_scratch,
    run,
    sequence_operand,
    spread_scratch,
    token_operand,
    token_scratch,
    unless_empty,
)
from ejkernel_pallas.tpu.selective_scan.kernels.selective_scan_bwd import NUMBERS_PER_PASS, selective_scan_bwd
from ejkernel_pallas.tpu.selective_scan.plan import Plan, make_plan
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK, ScanSpec

Gradients = dict[str, jax.Array]


@with_state_gradients
def backward(pullback: Pullback, config: TpuScan) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, states between chunks, cotangents of output and final states, and the requested names.
        config: Channels of a step.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: SelectiveScan = pullback.record
    plan = make_plan(record, config)
    spec, (outputs, final) = plan.spec, pullback.cotangent
    after = jnp.swapaxes(final, 1, 2).astype(jnp.float32)
    cotangent = plan.align(outputs.astype(record.x.dtype))
    results = run(
        "selective_scan_bwd",
        selective_scan_bwd,
        plan,
        inputs={
            **inputs(plan, record, backwards=True),
            "cotangent": token_operand(spec, cotangent, backwards=True),
            "chunk_states": chunk_operand(spec, pullback.residuals.states, backwards=True),
            "final": sequence_operand(spec, after, backwards=True),
        },
        outputs=_result_operands(plan, record, cotangent.shape, after.shape),
        scratch=_scratch(spec),
    )
    found = {
        "x": plan.unalign(results["dx"]),
        "step": plan.unalign(results["dstep"]),
        "decay": results["ddecay"].sum(axis=0).T,
        "write": _sum_channel_tiles(plan, record, results["dwrite"]),
        "read": _sum_channel_tiles(plan, record, results["dread"]),
        "skip": results["dskip"].sum(axis=(0, 1)),
        "initial_state": jnp.swapaxes(unless_empty(record, results["dinitial"], after), 1, 2),
    }
    return {name: found[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _result_operands(plan: Plan, record: SelectiveScan, tokens: tuple[int, ...], states: tuple[int, ...]) -> Blocks:
    """Returns the results of the kernel."""
    spec, rows = plan.spec, plan.rows
    sums = jax.ShapeDtypeStruct((rows, spec.tiles, spec.chunks, 1, CHUNK * spec.size), jnp.float32)

    def of_rows(size: int) -> Operand:
        x = jax.ShapeDtypeStruct((rows, size, spec.channels), jnp.float32)
        return Operand(x, (None, size, spec.block), lambda *step: (step[0], 0, step[1]))

    def of_columns() -> Operand:
        return Operand(
            sums,
            (None, None, None, 1, CHUNK * spec.size),
            lambda *step: (step[0], step[1], spec.chunks - 1 - step[2], 0, 0),
        )

    return {
        "dx": token_operand(spec, jax.ShapeDtypeStruct(tokens, record.x.dtype), backwards=True),
        "dstep": token_operand(spec, jax.ShapeDtypeStruct(tokens, record.step.dtype), backwards=True),
        "dwrite": of_columns(),
        "dread": of_columns(),
        "ddecay": of_rows(spec.size),
        "dskip": of_rows(1),
        "dinitial": sequence_operand(spec, jax.ShapeDtypeStruct(states, jnp.float32), backwards=True),
    }


def _scratch(spec: ScanSpec) -> dict[str, object]:
    """Returns the scratch memory that only the backward kernel uses."""
    products = pltpu.VMEM((CHUNK * NUMBERS_PER_PASS * SUBLANES, LANES), jnp.float32)
    return {
        "cotangents": token_scratch(spec),
        "step_gradients": token_scratch(spec),
        "before": number_scratch(spec),
        "history": pltpu.VMEM(((CHUNK + 1) * NUMBERS_PER_PASS * SUBLANES, LANES), jnp.float32),
        "products": products,
        "read_products": products,
        "write_gradients": spread_scratch(spec),
        "read_gradients": spread_scratch(spec),
        "rate_gradients": number_scratch(spec),
    }


def _sum_channel_tiles(plan: Plan, record: SelectiveScan, sums: jax.Array) -> jax.Array:
    """Returns the gradient of B or C, [B, T, E], from the sums of every tile."""
    spec = plan.spec
    x = sums.sum(axis=1).reshape(plan.rows, spec.chunks * CHUNK, spec.size)
    return plan.unalign(x)[:, : record.x.shape[1]]
