"""Backward pass of ring attention in one kernel per device: keys travel, and their gradients follow one load later."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.families.ring_attention import as_tiled_attention
from ejkernel.families.ring_attention.schedule import ring_of, travelling_keys_of
from ejkernel.families.tiled_attention import TiledAttention, sinks_gradient
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.ring_attention.kernels import collective_backward, remote_call
from ejkernel_pallas.tpu.ring_attention.kernels.collective_backward import (
    Gradients,
    QueryRows,
    make_query_rows,
    ring_step_operands,
    stripe_query_rows,
    unstriped_gradient,
)
from ejkernel_pallas.tpu.ring_attention.kernels.remote_copies import RefsByName, RingRoute
from ejkernel_pallas.tpu.ring_attention.plan import RingPlan
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward, backward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import current_entry
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dkv import key_gradients_kernel
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dq import query_gradient_kernel
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import kv_rows_operand, rows_operand, undo_rows_layout
from ejkernel_pallas.tpu.tiled_attention.kernels.recompute import backward_scratch
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.plan import (
    LAST_PAIR_FLAG,
    key_tile_of_entry,
    pairs_by_key,
    pairs_by_query,
    query_tile_of_entry,
)
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


def backward(pullback: Pullback, config: TpuBackward) -> Gradients:
    """Returns gradients of the requested fields of one device's record.

    Args:
        pullback: As for the backward pass by collectives, which is used unless query, key and value are all requested.
        config: As for tiled attention.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record, ring = pullback.record, ring_of(pullback.record)
    if ring is None or not pullback.grad_fields >= {"query", "key", "value"}:
        return collective_backward.backward(pullback, config)
    query_rows = make_query_rows(pullback)
    plan, shard_rows = RingPlan.of(record, ring), stripe_query_rows(query_rows, ring)
    local_load = travelling_keys_of(plan.record)
    shard_record = plan.make_shard_record(lax.axis_index(ring.axis_name), local_load)
    # Loads come from one direction and then from the other. Gradients of queries stay on the device; the second
    # direction adds to them.
    query, *kv_gradients = _run_one_direction(
        plan, shard_record, shard_rows, config, range(0, ring.num_before + 1), None
    )
    if ring.num_after:
        shifted = dataclasses.replace(
            shard_record, **ring.shift({name: getattr(shard_record, name) for name in local_load}, -1)
        )
        query, *other_gradients = _run_one_direction(
            plan, shifted, shard_rows, config, range(-1, -ring.num_after - 1, -1), query
        )
        kv_gradients = [one + other for one, other in zip(kv_gradients, other_gradients, strict=True)]
    grads = {"query": query, "key": kv_gradients[0], "value": kv_gradients[1]}
    if "softmax_aux" in pullback.grad_fields:
        grads["softmax_aux"] = sinks_gradient(
            dataclasses.replace(pullback, record=as_tiled_attention(record)), query_rows.cotangent_output_dots
        )
    return {name: unstriped_gradient(grads[name], name, record, ring) for name in sorted(pullback.grad_fields)}


class GradientPass(NamedTuple):
    """One of the two passes over a load's tiles: the one that accumulates for queries, or the one for keys.

    Attributes:
        spec: The kernel's constants.
        inputs: Arrays that tiles are read from.
        results: Arrays that are read, added to, and written.
        pair_table: Table of the tile pairs of all loads, int32 [loads, B|1, 1, steps].
        table_start: Where this pass's entries begin in the table that both passes share.
        scratch: Scratch memory that is kept between tiles.
        kernel: Called with the refs of each tile pair.
    """

    spec: TiledSpec
    inputs: dict[str, Operand]
    results: dict[str, Operand]
    pair_table: Any
    table_start: int
    scratch: dict[str, Any]
    kernel: Callable[..., None]

    @property
    def scratch_prefix(self) -> str:
        """Returns the prefix of the names of this pass's scratch memory, which tells it from the other pass's."""
        return "keys_" if self.spec.accumulates_for_keys else "queries_"

    @property
    def distinct_rows_and_heads(self) -> tuple[bool, bool]:
        """Returns whether batch rows, and heads, have tile pairs of their own; heads never have."""
        return self.pair_table.shape[1] > 1, False

    def tile_pairs_of_load(self, table: Any, load_index: Any) -> Any:
        """Returns the tile pairs of load `load_index`."""
        _, batch, _, steps = self.pair_table.shape
        return TableSlice(table, self.table_start + load_index * (batch * steps))


class TableSlice(NamedTuple):
    """A slice of a table in scalar memory."""

    table: Any
    start: Any

    def __getitem__(self, at: Any) -> Any:
        return self.table[self.start + at]


def _make_gradient_passes(
    plan: RingPlan, shard_record: TiledAttention, query_rows: QueryRows, config: TpuBackward, ring_steps: range
) -> tuple[GradientPass, GradientPass]:
    key_blocks, query_blocks = backward_blocks(config)
    spec = plan.spec(shard_record, query_blocks)
    zeros = {
        name: jnp.zeros(x.shape, jnp.float32)
        for name, x in (("query", shard_record.query), ("key", shard_record.key), ("value", shard_record.value))
    }
    pair_table = remote_call.make_pair_tables(plan, spec, shard_record, ring_steps, pairs_by_query)
    results = {"dquery": rows_operand(zeros["query"], spec.block_q)}
    scratch_memory = backward_scratch(spec, tuple(results), shard_record.query.dtype)
    queries = GradientPass(
        spec,
        ring_step_operands(shard_record, query_rows, spec),
        results,
        pair_table,
        0,
        scratch_memory,
        query_gradient_kernel,
    )
    spec = plan.spec(shard_record, key_blocks, accumulates_for_keys=True)
    results = {"dkey": kv_rows_operand(zeros["key"], spec), "dvalue": kv_rows_operand(zeros["value"], spec)}
    after = pair_table.size
    pair_table = remote_call.make_pair_tables(plan, spec, shard_record, ring_steps, pairs_by_key)
    scratch_memory = backward_scratch(spec, tuple(results), shard_record.query.dtype)
    return queries, GradientPass(
        spec,
        ring_step_operands(shard_record, query_rows, spec),
        results,
        pair_table,
        after,
        scratch_memory,
        key_gradients_kernel,
    )


def _run_one_direction(
    plan: RingPlan,
    shard_record: TiledAttention,
    query_rows: QueryRows,
    config: TpuBackward,
    ring_steps: range,
    query: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns gradients of queries, keys and values from the loads of one direction, those of keys back at their own
    device.
    """
    queries, keys = _make_gradient_passes(plan, shard_record, query_rows, config, ring_steps)
    if query is not None:
        queries = queries._replace(results={"dquery": rows_operand(query, queries.spec.block_q)})
    inputs, results = queries.inputs, queries.results | keys.results
    route = remote_call.make_route(plan.ring, ring_steps, inputs, carried_gradients=("dkey", "dvalue"))
    slots = remote_call.make_slot_buffers(route.load, inputs) | remote_call.make_slot_buffers(
        route.carried_gradients, results
    )
    scratch_memory = {
        gradient_pass.scratch_prefix + name: x
        for gradient_pass in (queries, keys)
        for name, x in gradient_pass.scratch.items()
    }
    results = launch(
        KernelCall(
            name="ejkernel_ring_backward_remote",
            kernel=functools.partial(_kernel, route=route, queries=queries, keys=keys),
            refs=functools.partial(remote_call.RemoteRefs.of, route, tuple(scratch_memory)),
            scalar_tables={
                "table": jnp.concatenate([queries.pair_table.reshape(-1), keys.pair_table.reshape(-1)]),
                "neighbours": remote_call.neighbour_indices(plan.ring, ring_steps),
            },
            inputs=remote_call.hbm_operands(inputs | {"dquery_before": results["dquery"]} | keys.results),
            outputs=remote_call.hbm_operands(queries.results) | slots,
            scratch=scratch_memory | route.scratch(),
            aliases={"dquery_before": "dquery"},
            has_inner_pipelines=True,
            compiler_params=remote_call.remote_compiler_options(plan.ring, ring_steps),
        )
    )
    # The slot where the last hop left its gradients.
    last = (len(ring_steps) - 1) % 2
    pairs = (("dkey_slots", shard_record.key), ("dvalue_slots", shard_record.value))
    carried_gradients = (undo_rows_layout(results[name][last], like.shape) for name, like in pairs)
    # One more shift brings the gradients to the device whose keys they belong to.
    return undo_rows_layout(results["dquery"], shard_record.query.shape), *plan.ring.shift(
        tuple(carried_gradients), -ring_steps[-1]
    )


def _kernel(refs: remote_call.RemoteRefs, *, route: RingRoute, queries: GradientPass, keys: GradientPass) -> None:
    def run_query_pass(load_index: Any, load: RefsByName) -> None:
        _run_gradient_pass(queries, queries.tile_pairs_of_load(refs.table, load_index), refs, load)

    def run_key_pass(load_index: Any, load: RefsByName) -> None:
        _run_gradient_pass(keys, keys.tile_pairs_of_load(refs.table, load_index), refs, load)

    route.for_each_load(refs.load, refs.carried_gradients, run_query_pass, run_key_pass)


def _run_gradient_pass(
    gradient_pass: GradientPass, pass_table: TableSlice, refs: remote_call.RemoteRefs, load: RefsByName
) -> None:
    """Runs one pass over a load's tiles in a pipeline that prefetches the next tiles, and adds to the results in
    place.
    """
    spec, steps = gradient_pass.spec, gradient_pass.pair_table.shape[3]
    heads = (
        (spec.num_heads // spec.group_size, steps, spec.group_size)
        if spec.accumulates_for_keys
        else (spec.num_heads, steps)
    )
    scratch = {name: refs.scratch[gradient_pass.scratch_prefix + name] for name in gradient_pass.scratch}

    def tile_coordinates(b: Any, h: Any, pair_index: Any, *group_member: Any) -> Any:
        at = pass_table[(b if gradient_pass.distinct_rows_and_heads[0] else 0) * steps + pair_index]
        return (
            b,
            h * spec.group_size + group_member[0] if group_member else h,
            query_tile_of_entry(at),
            key_tile_of_entry(at),
        )

    def process_tile(refs_by_name: RefsByName) -> None:
        # Earlier values are added when a tile is finished, so the kernels are those of a single device.
        before = {name: refs_by_name.pop(f"{name}_before") for name in gradient_pass.results}
        gradient_pass.kernel(
            BackwardRefs(table=pass_table, **refs_by_name, **scratch),
            spec=spec,
            distinct_rows_and_heads=gradient_pass.distinct_rows_and_heads,
        )
        last = (current_entry(pass_table, gradient_pass.distinct_rows_and_heads) & LAST_PAIR_FLAG) != 0
        _add_earlier_contributions(
            refs_by_name,
            before,
            last & (pl.program_id(3) == spec.group_size - 1) if spec.accumulates_for_keys else last,
        )

    grid = (gradient_pass.inputs["query"].array.shape[0], *heads)
    remote_call.run_pipeline(
        process_tile, refs, load, (gradient_pass.inputs, gradient_pass.results), grid, tile_coordinates
    )


def _add_earlier_contributions(refs_by_name: RefsByName, earlier_refs: RefsByName, is_tile_finished: Any) -> None:
    """Adds what earlier loads or devices contributed to what the kernel has just written."""

    @pl.when(is_tile_finished)
    def _() -> None:
        for name, x in earlier_refs.items():
            refs_by_name[name][...] += x[...]
