"""Forward pass of ring attention on TPUs with collectives, which move keys between calls of a kernel."""

from typing import Any

import jax

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import TravellingKeys, ring_of, travelling_keys_of
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import Operand, launch
from ejkernel_pallas.tpu.ring_attention.kernels.ring_softmax import RingForwardRefs, continue_softmax
from ejkernel_pallas.tpu.ring_attention.plan import RingPlan, initial_softmax_state
from ejkernel_pallas.tpu.tiled_attention import forward as tiled_forward
from ejkernel_pallas.tpu.tiled_attention.config import TpuForward, forward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import DistinctRowsAndHeads, current_entry
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_forward import forward_scratch
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import (
    operands,
    per_query_operand,
    rows_operand,
    undo_rows_layout,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.pair_call import tile_pairs_call
from ejkernel_pallas.tpu.tiled_attention.plan import pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

OutputAndLse = tuple[jax.Array, jax.Array]
"""Output and lse of attention to the keys so far."""


def forward(record: RingAttention, config: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments.
        config: As for tiled attention.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of(record)
    if ring is None:
        return tiled_forward.forward(as_tiled_attention(record), config)
    plan, blocks = RingPlan.of(record, ring), forward_blocks(config)

    def ring_step(source: jax.Array, load: TravellingKeys, state: OutputAndLse) -> tuple[TravellingKeys, OutputAndLse]:
        shard_record = plan.make_shard_record(source, load)
        spec = plan.spec(shard_record, blocks)
        return {}, _attend_to_shard(
            shard_record, spec, plan.tile_pairs(shard_record, spec, source, pairs_by_query), state
        )

    # The loop's state differs between devices after the first step, so it has to be marked as varying before the loop.
    begin = _compat.as_varying(initial_softmax_state(record), record)
    _, (output, lse) = ring.run_ring(travelling_keys_of(plan.record), {}, ring_step, begin)
    output = ring.unstripe(output.astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(lse, 2))


def _attend_to_shard(shard_record: TiledAttention, spec: TiledSpec, table: Any, state: OutputAndLse) -> OutputAndLse:
    """Returns the state updated with the keys of a ring step."""
    results = state_operands(state, spec)
    inputs = operands(shard_record, spec) | {f"{name}_before": x for name, x in results.items()}
    scratch_memory, name = forward_scratch(spec, shard_record.value.dtype), "ejkernel_ring_forward"
    results = launch(tile_pairs_call(name, _kernel, RingForwardRefs, table, spec, inputs, results, scratch_memory))
    return undo_rows_layout(results["output"], state[0].shape), results["lse"].reshape(state[1].shape)


def state_operands(state: OutputAndLse, spec: TiledSpec) -> dict[str, Operand]:
    """Returns output and lse as operands that kernels read and write."""
    return {"output": rows_operand(state[0], spec.block_q), "lse": per_query_operand(state[1], spec)}


def _kernel(refs: RingForwardRefs, *, spec: TiledSpec, distinct_rows_and_heads: DistinctRowsAndHeads) -> None:
    continue_softmax(current_entry(refs.table, distinct_rows_and_heads), refs, spec)
