"""Forward pass of the selective scan on TPUs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan, first_state, packed_scan
from ejkernel.families.selective_scan.scan_sequences import with_states
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.selective_scan.config import TpuScan
from ejkernel_pallas.tpu.selective_scan.kernels.selective_scan_fwd import selective_scan_fwd
from ejkernel_pallas.tpu.selective_scan.kernels.selective_state_update import (
    UpdateRefs,
    selective_state_update,
    strip_channels,
)
from ejkernel_pallas.tpu.selective_scan.kernels.tile import ScanRefs, sequence_of
from ejkernel_pallas.tpu.selective_scan.plan import (
    LOG2E,
    SLOT_FACTOR,
    Plan,
    UpdatePlan,
    make_plan,
    make_update_plan,
)
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK, ScanSpec

Blocks = dict[str, Operand]


def forward(record: SelectiveScan, config: TpuScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns the output and the final states of a record.

    Args:
        record: The canonical arguments.
        config: Channels of a step.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E] float32, or [N, I, E] of packed sequences, and the states
        between chunks.
    """
    held, indices, bounds = record.initial_state, record.state_slots, record.cu_seqlens
    if held is None or indices is None or bounds is None:
        return _scan(record, config)
    chunks = make_update_plan(record, bounds, indices, held.shape[0], config)
    # XLA computes the residuals of calls with a backward pass, and drops those of the others.
    return _update_slots(record, chunks, held), _scan(record, config)[1]


@with_states
def _scan(record: SelectiveScan, config: TpuScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns the output and the final states of a record, by chunks of 64 tokens."""
    plan = make_plan(record, config)
    spec, first = plan.spec, first_state(record)
    x = plan.align(record.x)
    states = jax.ShapeDtypeStruct((plan.rows, spec.chunks, spec.size, spec.channels), jnp.float32)
    results = run(
        "selective_scan_fwd",
        selective_scan_fwd,
        plan,
        inputs={**inputs(plan, record), "initial": sequence_operand(spec, first)},
        outputs={
            "output": token_operand(spec, jax.ShapeDtypeStruct(x.shape, x.dtype)),
            "chunk_states": chunk_operand(spec, states),
            "final": sequence_operand(spec, jax.ShapeDtypeStruct(first.shape, jnp.float32)),
        },
        scratch={},
    )
    final, states = unless_empty(record, results["final"], first), results["chunk_states"]
    if record.cu_seqlens is not None:
        states = packed_scan.stored_states(record.cu_seqlens, states)
    return (plan.unalign(results["output"]), jnp.swapaxes(final, 1, 2)), ScanResiduals(states=states)


def _update_slots(record: SelectiveScan, plan: UpdatePlan, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output, and the slots after the sequences that have one, in the memory of the slots before."""
    spec, slots = plan.spec, jnp.swapaxes(held, 1, 2)
    block, x = (None, spec.size, spec.block), plan.align(record.x)

    def tokens(x: Any) -> Operand:
        return Operand(x, (None, *x.shape[1:3], spec.block), lambda tile, chunk, *_: (chunk, 0, 0, tile))

    def slot(tile: Any, chunk: Any, table: Any) -> tuple[Any, ...]:
        return lax.div(table[chunk], jnp.int32(SLOT_FACTOR)), 0, tile

    def channels(x: jax.Array) -> Operand:
        return Operand(x, (x.shape[0], spec.block), lambda tile, *_: (0, tile))

    columns = plan.columns(record.write, record.read)
    results = launch(
        KernelCall(
            name="ejkernel_selective_scan_selective_state_update",
            kernel=functools.partial(selective_state_update, spec=spec),
            refs=UpdateRefs,
            grid=(spec.tiles, plan.places.used),
            parallel=1,
            tables={"table": plan.table},
            inputs={
                "x": tokens(x),
                "step": tokens(plan.align(record.step)),
                "columns": Operand(columns, (None, *columns.shape[1:]), lambda tile, chunk, *_: (chunk, 0, 0, 0)),
                "decay": channels(record.decay.T.astype(jnp.float32) * LOG2E),
                "skip": channels(record.skip.astype(jnp.float32)[None]),
                "initial": Operand(slots, block, slot),
            },
            outputs={
                "output": tokens(jax.ShapeDtypeStruct(x.shape, x.dtype)),
                "final": Operand(jax.ShapeDtypeStruct(slots.shape, slots.dtype), block, slot),
            },
            scratch={
                "state": pltpu.VMEM((spec.size, spec.block), jnp.float32),
                "spread": pltpu.VMEM((2 * spec.tokens, spec.size, LANES), jnp.float32),
                "rows": pltpu.VMEM((2 * spec.tokens, strip_channels(spec)), jnp.float32),
            },
            aliases={"initial": "final"},
        )
    )
    return plan.unalign(results["output"]), jnp.swapaxes(results["final"], 1, 2)


def inputs(plan: Plan, record: SelectiveScan, *, backwards: bool = False) -> Blocks:
    """Returns the operands that both kernels read."""
    spec = plan.spec
    skip = record.skip.astype(jnp.float32)[None]
    return {
        "x": token_operand(spec, plan.align(record.x), backwards=backwards),
        "step": token_operand(spec, plan.align(record.step), backwards=backwards),
        "write": column_operand(spec, plan.columns(record.write), backwards=backwards),
        "read": column_operand(spec, plan.columns(record.read), backwards=backwards),
        "decay": Operand(record.decay.T.astype(jnp.float32) * LOG2E, (spec.size, spec.block), _channel_tile_index),
        "skip": Operand(skip, (1, spec.block), _channel_tile_index),
    }


def _channel_tile_index(*step: Any) -> tuple[Any, ...]:
    return 0, step[1]


def _chunk_index(spec: ScanSpec, chunk: Any, backwards: bool) -> Any:
    return spec.chunks - 1 - chunk if backwards else chunk


def token_operand(spec: ScanSpec, x: Any, *, backwards: bool = False) -> Operand:
    """Returns the operand that gives a grid step its chunk of tokens and its channels of [B, T, I]."""
    return Operand(
        x, (None, CHUNK, spec.block), lambda *step: (step[0], _chunk_index(spec, step[2], backwards), step[1])
    )


def column_operand(spec: ScanSpec, x: Any, *, backwards: bool = False) -> Operand:
    """Returns the operand of [B, chunks, E, 64], or of an array with other last axes, with one block per chunk."""
    return Operand(x, (None, None, *x.shape[2:]), lambda *step: (step[0], _chunk_index(spec, step[2], backwards), 0, 0))


def chunk_operand(spec: ScanSpec, x: Any, *, backwards: bool = False) -> Operand:
    """States [B, chunks, E, I] as blocks of a chunk."""
    return Operand(
        x,
        (None, None, spec.size, spec.block),
        lambda *step: (step[0], _chunk_index(spec, step[2], backwards), 0, step[1]),
    )


def sequence_operand(spec: ScanSpec, x: Any, *, backwards: bool = False) -> Operand:
    """States [N, E, I] as blocks of the row or sequence of a chunk."""

    def index(row: Any, tile: Any, chunk: Any, table: Any) -> tuple[Any, ...]:
        return sequence_of(table, spec, row, _chunk_index(spec, chunk, backwards)), 0, tile

    return Operand(x, (None, spec.size, spec.block), index)


def run(
    name: str,
    kernel: Any,
    plan: Plan,
    *,
    inputs: Blocks,
    outputs: Blocks,
    scratch: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs a kernel on all chunks."""
    spec = plan.spec
    return launch(
        KernelCall(
            name=f"ejkernel_selective_scan_{name}",
            kernel=functools.partial(kernel, spec=spec),
            refs=ScanRefs,
            grid=(plan.rows, spec.tiles, spec.chunks),
            # Rows and channels; the chunks of a row follow each other.
            parallel=2,
            tables={"table": plan.table},
            inputs=inputs,
            outputs=outputs,
            scratch={
                "state": number_scratch(spec),
                "rates": number_scratch(spec),
                "steps": token_scratch(spec),
                "inputs": token_scratch(spec),
                "results": token_scratch(spec),
                "writes": spread_scratch(spec),
                "reads": spread_scratch(spec),
                **scratch,
            },
        )
    )


def number_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for the states of a grid step."""
    return pltpu.VMEM((spec.groups * spec.size * SUBLANES, LANES), jnp.float32)


def token_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for the tokens of a chunk."""
    return pltpu.VMEM((spec.groups * SUBLANES * CHUNK, LANES), jnp.float32)


def spread_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for B or C of a chunk."""
    return pltpu.VMEM((CHUNK * spec.size, LANES), jnp.float32)


def unless_empty(record: SelectiveScan, found: jax.Array, otherwise: jax.Array) -> jax.Array:
    """States of sequences: where a sequence has no tokens no step writes one."""
    if record.cu_seqlens is None:
        return found
    return jnp.where((jnp.diff(record.cu_seqlens) > 0)[:, None, None], found, otherwise)
