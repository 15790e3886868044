"""Forward pass of the selective scan on TPUs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import LOG2E
from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan, first_state, packed_scan
from ejkernel.families.selective_scan.scan_sequences import forward_with_slot_states
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.selective_scan.config import TpuScan
from ejkernel_pallas.tpu.selective_scan.kernels.selective_scan_fwd import selective_scan_fwd
from ejkernel_pallas.tpu.selective_scan.kernels.selective_state_update import (
    UpdateRefs,
    selective_state_update,
    strip_channels,
)
from ejkernel_pallas.tpu.selective_scan.kernels.tile import ScanRefs, read_sequence_of_chunk
from ejkernel_pallas.tpu.selective_scan.plan import (
    ENTRY_SLOT_STRIDE,
    ScanPlan,
    SlotUpdatePlan,
    make_plan,
    make_slot_update_plan,
)
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK_TOKENS, ScanSpec, UpdateSpec

OperandsByName = dict[str, Operand]


def forward(record: SelectiveScan, config: TpuScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns the output and the final states of a record.

    Args:
        record: The canonical arguments.
        config: Channels per grid step, and unrolled tokens.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E] float32, or [N, I, E] of packed sequences, and the states
        between chunks.
    """
    slots, slot_of_sequence, bounds = record.initial_state, record.state_slots, record.cu_seqlens
    if slots is None or slot_of_sequence is None or bounds is None:
        return _scan_in_chunks(record, config)
    plan = make_slot_update_plan(record, bounds, slot_of_sequence, slots.shape[0], config)
    # XLA computes the residuals of calls with a backward pass, and drops those of the others.
    return _update_slots(record, plan, slots), _scan_in_chunks(record, config)[1]


@forward_with_slot_states
def _scan_in_chunks(record: SelectiveScan, config: TpuScan) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns the output and the final states of a record, by chunks of 64 tokens."""
    plan = make_plan(record, config)
    spec, first = plan.spec, first_state(record)
    x = plan.gather_to_chunks(record.x)
    states = jax.ShapeDtypeStruct((plan.batch_size, spec.chunks_per_row, spec.state_size, spec.channels), jnp.float32)
    results = run(
        "selective_scan_fwd",
        selective_scan_fwd,
        plan,
        inputs={**shared_operands(plan, record), "initial_state": sequence_states_operand(spec, first)},
        outputs={
            "output": token_operand(spec, jax.ShapeDtypeStruct(x.shape, x.dtype)),
            "chunk_states": chunk_states_operand(spec, states),
            "final_state": sequence_states_operand(spec, jax.ShapeDtypeStruct(first.shape, jnp.float32)),
        },
        scratch={},
    )
    final, states = keep_states_of_empty_sequences(record, results["final_state"], first), results["chunk_states"]
    if record.cu_seqlens is not None:
        states = packed_scan.zero_unused_states(record.cu_seqlens, states)
    return (plan.gather_from_chunks(results["output"]), jnp.swapaxes(final, 1, 2)), ScanResiduals(states=states)


def _update_slots(record: SelectiveScan, plan: SlotUpdatePlan, slot_states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output, and the slots with the final states of their sequences, updated in place."""
    spec, transposed_slots = plan.spec, jnp.swapaxes(slot_states, 1, 2)
    block, x = (None, spec.state_size, spec.channels_per_step), plan.gather_to_chunks(record.x)
    output_slots = jax.ShapeDtypeStruct(transposed_slots.shape, transposed_slots.dtype)

    def update_token_operand(x: Any) -> Operand:
        return Operand(x, (None, *x.shape[1:3], spec.channels_per_step), lambda tile, chunk, *_: (chunk, 0, 0, tile))

    def slot_index(tile: Any, chunk: Any, table: Any) -> tuple[Any, ...]:
        return lax.div(table[chunk], jnp.int32(ENTRY_SLOT_STRIDE)), 0, tile

    def update_channel_operand(x: jax.Array) -> Operand:
        return Operand(x, (x.shape[0], spec.channels_per_step), lambda tile, *_: (0, tile))

    columns = plan.arrange_write_and_read(record.write, record.read)
    results = launch(
        KernelCall(
            name="ejkernel_selective_scan_selective_state_update",
            kernel=functools.partial(selective_state_update, spec=spec),
            refs=UpdateRefs,
            grid=(spec.num_channel_tiles, plan.token_positions.num_used_chunks),
            num_parallel_axes=1,
            scalar_tables={"chunk_table": plan.chunk_table},
            inputs={
                "x": update_token_operand(x),
                "dt": update_token_operand(plan.gather_to_chunks(record.step)),
                "write_and_read": Operand(columns, (None, *columns.shape[1:]), lambda _, chunk, *__: (chunk, 0, 0, 0)),
                "decay": update_channel_operand(record.decay.T.astype(jnp.float32) * LOG2E),
                "skip": update_channel_operand(record.skip.astype(jnp.float32)[None]),
                "initial_state": Operand(transposed_slots, block, slot_index),
            },
            outputs={
                "output": update_token_operand(jax.ShapeDtypeStruct(x.shape, x.dtype)),
                "final_state": Operand(output_slots, block, slot_index),
            },
            scratch=_update_scratch(spec),
            aliases={"initial_state": "final_state"},
        )
    )
    return plan.gather_from_chunks(results["output"]), jnp.swapaxes(results["final_state"], 1, 2)


def _update_scratch(spec: UpdateSpec) -> dict[str, Any]:
    """Returns the memory that the update keeps: the state, B and C in all lanes, and the tokens' dt."""
    return {
        "state": pltpu.VMEM((spec.state_size, spec.channels_per_step), jnp.float32),
        "write_and_read_in_all_lanes": pltpu.VMEM((2 * spec.tokens_per_octet, spec.state_size, LANES), jnp.float32),
        "dt_and_dt_x_rows": pltpu.VMEM((2 * spec.tokens_per_octet, strip_channels(spec)), jnp.float32),
    }


def shared_operands(plan: ScanPlan, record: SelectiveScan, *, reverses_chunks: bool = False) -> OperandsByName:
    """Returns the operands that both kernels read."""
    spec = plan.spec
    skip = record.skip.astype(jnp.float32)[None]
    return {
        "x": token_operand(spec, plan.gather_to_chunks(record.x), reverses_chunks=reverses_chunks),
        "dt": token_operand(spec, plan.gather_to_chunks(record.step), reverses_chunks=reverses_chunks),
        "write": write_or_read_operand(spec, plan.arrange_write_or_read(record.write), reverses_chunks=reverses_chunks),
        "read": write_or_read_operand(spec, plan.arrange_write_or_read(record.read), reverses_chunks=reverses_chunks),
        "decay": Operand(
            record.decay.T.astype(jnp.float32) * LOG2E, (spec.state_size, spec.channels_per_step), _channel_tile_index
        ),
        "skip": Operand(skip, (1, spec.channels_per_step), _channel_tile_index),
    }


def _channel_tile_index(*step: Any) -> tuple[Any, ...]:
    """Returns the block index of an array of channels, without tokens, in a grid step."""
    return 0, step[1]


def _chunk_index(spec: ScanSpec, chunk: Any, reverses_chunks: bool) -> Any:
    """Returns the chunk that a grid step processes; with `reverses_chunks` they are counted from the last one."""
    return spec.chunks_per_row - 1 - chunk if reverses_chunks else chunk


def token_operand(spec: ScanSpec, x: Any, *, reverses_chunks: bool = False) -> Operand:
    """Returns the operand that gives a grid step its chunk of tokens and its channels of [B, T, I]."""
    return Operand(
        x,
        (None, CHUNK_TOKENS, spec.channels_per_step),
        lambda *step: (step[0], _chunk_index(spec, step[2], reverses_chunks), step[1]),
    )


def write_or_read_operand(spec: ScanSpec, x: Any, *, reverses_chunks: bool = False) -> Operand:
    """Returns the operand of [B, chunks, E, 64], or of an array with other last axes, with one block per chunk."""
    return Operand(
        x, (None, None, *x.shape[2:]), lambda *step: (step[0], _chunk_index(spec, step[2], reverses_chunks), 0, 0)
    )


def chunk_states_operand(spec: ScanSpec, x: Any, *, reverses_chunks: bool = False) -> Operand:
    """Returns the operand of states [B, chunks, E, I], with one block per chunk."""
    return Operand(
        x,
        (None, None, spec.state_size, spec.channels_per_step),
        lambda *step: (step[0], _chunk_index(spec, step[2], reverses_chunks), 0, step[1]),
    )


def sequence_states_operand(spec: ScanSpec, x: Any, *, reverses_chunks: bool = False) -> Operand:
    """Returns the operand of states [N, E, I], with the block of the chunk's row or packed sequence."""

    def index(row: Any, tile: Any, chunk: Any, table: Any) -> tuple[Any, ...]:
        return read_sequence_of_chunk(table, spec, row, _chunk_index(spec, chunk, reverses_chunks)), 0, tile

    return Operand(x, (None, spec.state_size, spec.channels_per_step), index)


def run(
    name: str,
    kernel: Any,
    plan: ScanPlan,
    *,
    inputs: OperandsByName,
    outputs: OperandsByName,
    scratch: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs a kernel on all chunks."""
    spec = plan.spec
    return launch(
        KernelCall(
            name=f"ejkernel_selective_scan_{name}",
            kernel=functools.partial(kernel, spec=spec),
            refs=ScanRefs,
            grid=(plan.batch_size, spec.num_channel_tiles, spec.chunks_per_row),
            # Rows and channels; the chunks of a row follow each other.
            num_parallel_axes=2,
            scalar_tables={"chunk_table": plan.chunk_table},
            inputs=inputs,
            outputs=outputs,
            scratch={
                "state": state_scratch(spec),
                "decay_registers": state_scratch(spec),
                "dt_octets": token_channel_scratch(spec),
                "dt_x_octets": token_channel_scratch(spec),
                "results_by_token": token_channel_scratch(spec),
                "write_in_all_lanes": b_or_c_scratch(spec),
                "read_in_all_lanes": b_or_c_scratch(spec),
                **scratch,
            },
        )
    )


def state_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for the states of a grid step's channels."""
    return pltpu.VMEM((spec.groups_per_step * spec.state_size * SUBLANES, LANES), jnp.float32)


def token_channel_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for one value per token and channel of a chunk."""
    return pltpu.VMEM((spec.groups_per_step * SUBLANES * CHUNK_TOKENS, LANES), jnp.float32)


def b_or_c_scratch(spec: ScanSpec) -> Any:
    """Returns the scratch memory for B (what tokens write) or C (what they read) of a chunk, repeated in all lanes."""
    return pltpu.VMEM((CHUNK_TOKENS * spec.state_size, LANES), jnp.float32)


def keep_states_of_empty_sequences(
    record: SelectiveScan, final_states: jax.Array, initial_states: jax.Array
) -> jax.Array:
    """Returns final states, with the initial states of packed sequences without tokens, which no step writes."""
    if record.cu_seqlens is None:
        return final_states
    return jnp.where((jnp.diff(record.cu_seqlens) > 0)[:, None, None], final_states, initial_states)
