"""Backward pass of the selective scan on TPUs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import backward_with_slot_states
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.selective_scan.config import TpuScan
from ejkernel_pallas.tpu.selective_scan.forward import (
    OperandsByName,
    b_or_c_scratch,
    chunk_states_operand,
    keep_states_of_empty_sequences,
    run,
    sequence_states_operand,
    shared_operands,
    state_scratch,
    token_channel_scratch,
    token_operand,
)
from ejkernel_pallas.tpu.selective_scan.kernels.selective_scan_bwd import STATE_ELEMENTS_PER_PASS, selective_scan_bwd
from ejkernel_pallas.tpu.selective_scan.plan import ScanPlan, make_plan
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK_TOKENS, ScanSpec

Gradients = dict[str, jax.Array]


@backward_with_slot_states
def backward(pullback: Pullback, config: TpuScan) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, states between chunks, cotangents of output and final states, and the requested names.
        config: Channels per grid step, and unrolled tokens.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: SelectiveScan = pullback.record
    plan = make_plan(record, config)
    spec, (outputs, final) = plan.spec, pullback.cotangent
    final_cotangent = jnp.swapaxes(final, 1, 2).astype(jnp.float32)
    cotangent = plan.gather_to_chunks(outputs.astype(record.x.dtype))
    results = run(
        "selective_scan_bwd",
        selective_scan_bwd,
        plan,
        inputs={
            **shared_operands(plan, record, reverses_chunks=True),
            "cotangent": token_operand(spec, cotangent, reverses_chunks=True),
            "chunk_states": chunk_states_operand(spec, pullback.residuals.states, reverses_chunks=True),
            "final_state": sequence_states_operand(spec, final_cotangent, reverses_chunks=True),
        },
        outputs=_make_result_operands(plan, record, cotangent.shape, final_cotangent.shape),
        scratch=_scratch(spec),
    )
    gradients = {
        "x": plan.gather_from_chunks(results["dx"]),
        "step": plan.gather_from_chunks(results["dstep"]),
        "decay": results["ddecay"].sum(axis=0).T,
        "write": _sum_gradients_over_channel_tiles(plan, record, results["dwrite"]),
        "read": _sum_gradients_over_channel_tiles(plan, record, results["dread"]),
        "skip": results["dskip"].sum(axis=(0, 1)),
        "initial_state": jnp.swapaxes(
            keep_states_of_empty_sequences(record, results["dinitial_state"], final_cotangent), 1, 2
        ),
    }
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _make_result_operands(
    plan: ScanPlan, record: SelectiveScan, token_shape: tuple[int, ...], state_shape: tuple[int, ...]
) -> OperandsByName:
    """Returns the operands of the kernel's results."""
    spec, rows = plan.spec, plan.batch_size
    sums = jax.ShapeDtypeStruct(
        (rows, spec.num_channel_tiles, spec.chunks_per_row, 1, CHUNK_TOKENS * spec.state_size), jnp.float32
    )

    def token_sum_operand(size: int) -> Operand:
        x = jax.ShapeDtypeStruct((rows, size, spec.channels), jnp.float32)
        return Operand(x, (None, size, spec.channels_per_step), lambda *step: (step[0], 0, step[1]))

    def channel_sum_operand() -> Operand:
        return Operand(
            sums,
            (None, None, None, 1, CHUNK_TOKENS * spec.state_size),
            lambda *step: (step[0], step[1], spec.chunks_per_row - 1 - step[2], 0, 0),
        )

    return {
        "dx": token_operand(spec, jax.ShapeDtypeStruct(token_shape, record.x.dtype), reverses_chunks=True),
        "dstep": token_operand(spec, jax.ShapeDtypeStruct(token_shape, record.step.dtype), reverses_chunks=True),
        "dwrite": channel_sum_operand(),
        "dread": channel_sum_operand(),
        "ddecay": token_sum_operand(spec.state_size),
        "dskip": token_sum_operand(1),
        "dinitial_state": sequence_states_operand(
            spec, jax.ShapeDtypeStruct(state_shape, jnp.float32), reverses_chunks=True
        ),
    }


def _scratch(spec: ScanSpec) -> dict[str, object]:
    """Returns the scratch memory that only the backward kernel uses."""
    products = pltpu.VMEM((CHUNK_TOKENS * STATE_ELEMENTS_PER_PASS * SUBLANES, LANES), jnp.float32)
    return {
        "cotangent_octets": token_channel_scratch(spec),
        "dt_gradients_by_token": token_channel_scratch(spec),
        "states_before_chunk": state_scratch(spec),
        "state_history": pltpu.VMEM(((CHUNK_TOKENS + 1) * STATE_ELEMENTS_PER_PASS * SUBLANES, LANES), jnp.float32),
        "dwrite_by_channel": products,
        "dread_by_channel": products,
        "dwrite_by_lane": b_or_c_scratch(spec),
        "dread_by_lane": b_or_c_scratch(spec),
        "decay_gradients": state_scratch(spec),
    }


def _sum_gradients_over_channel_tiles(plan: ScanPlan, record: SelectiveScan, sums: jax.Array) -> jax.Array:
    """Returns the gradient of B or C, [B, T, E], from the sums over each tile's channels."""
    spec = plan.spec
    x = sums.sum(axis=1).reshape(plan.batch_size, spec.chunks_per_row * CHUNK_TOKENS, spec.state_size)
    return plan.gather_from_chunks(x)[:, : record.x.shape[1]]
