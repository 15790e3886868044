"""Forward pass of ring attention on TPUs: keys travel by collectives, a kernel works on those that are there."""

from typing import Any

import jax

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention, tiled
from ejkernel.families.ring_attention.schedule import Load, load_of, ring_of
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import Operand, launch
from ejkernel_pallas.tpu.ring_attention.ring_plan import RingPlan, empty_state
from ejkernel_pallas.tpu.ring_attention.softmax import RingForwardRefs, continue_softmax
from ejkernel_pallas.tpu.tiled_attention import forward as tiles
from ejkernel_pallas.tpu.tiled_attention.call import pairs_call
from ejkernel_pallas.tpu.tiled_attention.forward_kernel import scratch
from ejkernel_pallas.tpu.tiled_attention.operands import of_queries, operands, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.pair_table import pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec
from ejkernel_pallas.tpu.tiled_attention.tile import Distinct, current_entry
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuForward, forward_blocks

State = tuple[jax.Array, jax.Array]
"""Output and lse of the keys so far."""


def forward(record: RingAttention, params: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments.
        params: As for tiled attention.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of(record)
    if ring is None:
        return tiles.forward(tiled(record), params)
    plan, blocks = RingPlan.of(record, ring), forward_blocks(params)

    def ring_step(source: jax.Array, load: Load, state: State) -> tuple[Load, State]:
        shard = plan.shard(source, load)
        spec = plan.spec(shard, blocks)
        return {}, _attend(shard, spec, plan.pairs(shard, spec, source, pairs_by_query), state)

    # The loop's state differs between devices from the first step on, so it must be marked so before.
    begin = _compat.as_varying(empty_state(record), record)
    _, (output, lse) = ring.walk(load_of(plan.record), {}, ring_step, begin)
    output = ring.unstripe(output.astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(lse, 2))


def _attend(shard: TiledAttention, spec: TiledSpec, table: Any, state: State) -> State:
    """The state with the keys of a ring step."""
    results = states(state, spec)
    inputs = operands(shard, spec) | {f"{name}_before": x for name, x in results.items()}
    kept, name = scratch(spec, shard.value.dtype), "ejkernel_ring_forward"
    made = launch(pairs_call(name, _kernel, RingForwardRefs, table, spec, inputs, results, kept))
    return unrows(made["output"], state[0].shape), made["lse"].reshape(state[1].shape)


def states(state: State, spec: TiledSpec) -> dict[str, Operand]:
    """Output and lse as kernels read and write them."""
    return {"output": rows(state[0], spec.block_q), "lse": of_queries(state[1], spec)}


def _kernel(refs: RingForwardRefs, *, spec: TiledSpec, distinct: Distinct) -> None:
    continue_softmax(current_entry(refs.table, distinct), refs, spec)
