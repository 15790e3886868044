"""Forward pass of ring attention in one kernel per device, which sends keys to the next device while computing with
them.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention.schedule import ring_of, travelling_keys_of
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.ring_attention.kernels import remote_call
from ejkernel_pallas.tpu.ring_attention.kernels.collective_forward import OutputAndLse, state_operands
from ejkernel_pallas.tpu.ring_attention.kernels.remote_copies import RefsByName, RingRoute
from ejkernel_pallas.tpu.ring_attention.kernels.ring_softmax import RingForwardRefs, continue_softmax
from ejkernel_pallas.tpu.ring_attention.plan import RingPlan, initial_softmax_state
from ejkernel_pallas.tpu.tiled_attention.config import TpuForward, forward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels import flash_forward
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import operands, undo_rows_layout
from ejkernel_pallas.tpu.tiled_attention.plan import key_tile_of_entry, pairs_by_query, query_tile_of_entry
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


def forward(record: RingAttention, config: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments; shards must consist of whole tiles.
        config: As for tiled attention.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of(record)
    assert ring is not None  # the implementation's requirements guarantee a ring
    plan = RingPlan.of(record, ring)
    me, local_load = lax.axis_index(ring.axis_name), travelling_keys_of(plan.record)
    shard_record = plan.make_shard_record(me, local_load)
    spec, state = (
        plan.spec(shard_record, forward_blocks(config)),
        _compat.as_varying(initial_softmax_state(record), record),
    )
    state = _run_one_direction(plan, spec, shard_record, state, range(0, ring.num_before + 1))
    if ring.num_after:
        shifted = dataclasses.replace(
            shard_record, **ring.shift({name: getattr(shard_record, name) for name in local_load}, -1)
        )
        state = _run_one_direction(plan, spec, shifted, state, range(-1, -ring.num_after - 1, -1))
    output = ring.unstripe(state[0].astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(state[1], 2))


def _run_one_direction(
    plan: RingPlan, spec: TiledSpec, shard_record: TiledAttention, state: OutputAndLse, ring_steps: range
) -> OutputAndLse:
    """Returns the state updated with the loads of one direction, the first of which is `shard_record`'s."""
    pair_table, inputs, results = (
        remote_call.make_pair_tables(plan, spec, shard_record, ring_steps, pairs_by_query),
        operands(shard_record, spec),
        state_operands(state, spec),
    )
    route = remote_call.make_route(plan.ring, ring_steps, inputs)
    scratch = flash_forward.forward_scratch(spec, shard_record.value.dtype)
    work = _AttendToShard(spec=spec, inputs=inputs, results=results, pair_table=pair_table.shape)
    results = launch(
        KernelCall(
            name="ejkernel_ring_forward_remote",
            kernel=functools.partial(_kernel, route=route, work=work),
            refs=functools.partial(remote_call.RemoteRefs.of, route, tuple(scratch)),
            scalar_tables={
                "table": pair_table.reshape(-1),
                "neighbours": remote_call.neighbour_indices(plan.ring, ring_steps),
            },
            inputs=remote_call.hbm_operands(inputs | {f"{name}_before": x for name, x in results.items()}),
            outputs=remote_call.hbm_operands(results) | remote_call.make_slot_buffers(route.load, inputs),
            scratch=scratch | route.scratch(),
            aliases={f"{name}_before": name for name in results},
            has_inner_pipelines=True,
            compiler_params=remote_call.remote_compiler_options(plan.ring, ring_steps),
        )
    )
    return undo_rows_layout(results["output"], state[0].shape), results["lse"].reshape(state[1].shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AttendToShard:
    """Processes the pairs of query and key tiles of one load of keys.

    Attributes:
        spec: The kernels' constants.
        inputs: Arrays that tiles are read from.
        results: Arrays that are read and written.
        pair_table: Shape of the table of tile pairs.
    """

    spec: TiledSpec
    inputs: dict[str, Operand]
    results: dict[str, Operand]
    pair_table: tuple[int, ...]

    def __call__(self, refs: remote_call.RemoteRefs, load_index: Any, load: RefsByName) -> None:
        """Updates the state with one load of keys, tile pair by tile pair, in a pipeline that prefetches the next
        tiles.
        """
        (_, is_batched, _, steps), spec = self.pair_table, self.spec

        def pair_entry(b: Any, step: Any) -> Any:
            return refs.table[(load_index * is_batched + (b if is_batched > 1 else 0)) * steps + step]

        def tile_coordinates(b: Any, h: Any, pair_index: Any) -> Any:
            at = pair_entry(b, pair_index)
            return b, h, query_tile_of_entry(at), key_tile_of_entry(at)

        def process_tile(refs_by_name: RefsByName) -> None:
            blocks = RingForwardRefs(table=refs.table, **refs_by_name, **refs.scratch)
            continue_softmax(pair_entry(pl.program_id(0), pl.program_id(2)), blocks, spec)

        grid = (self.results["lse"].array.shape[0], spec.num_heads, steps)
        remote_call.run_pipeline(process_tile, refs, load, (self.inputs, self.results), grid, tile_coordinates)


def _kernel(refs: remote_call.RemoteRefs, *, route: RingRoute, work: _AttendToShard) -> None:
    route.for_each_load(
        refs.load, None, lambda load_index, load: work(refs, load_index, load), lambda load_index, load: None
    )
