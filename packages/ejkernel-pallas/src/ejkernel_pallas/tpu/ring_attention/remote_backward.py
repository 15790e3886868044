"""Backward pass of ring attention in one kernel a device: keys travel, and their gradients a load behind them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.families.ring_attention import tiled
from ejkernel.families.tiled_attention import TiledAttention, sinks_gradient
from ejkernel.ops.pullback import Pullback
from ejkernel.planning.ring_schedule import load_of, ring_of
from ejkernel_pallas.tpu.mosaic.launch import Call, Operand, launch
from ejkernel_pallas.tpu.ring_attention import alone
from ejkernel_pallas.tpu.ring_attention import backward as collectives
from ejkernel_pallas.tpu.ring_attention.backward import Gradients, Rows, home, inputs_of, rows_of, striped
from ejkernel_pallas.tpu.ring_attention.neighbours import Arrays, Route
from ejkernel_pallas.tpu.ring_attention.plan import Plan
from ejkernel_pallas.tpu.tiled_attention.backward import scratch
from ejkernel_pallas.tpu.tiled_attention.backward_kernels import keys_kernel, queries_kernel
from ejkernel_pallas.tpu.tiled_attention.operands import kv_rows, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.spec import Spec
from ejkernel_pallas.tpu.tiled_attention.tile import visited
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuBackward, backward_blocks
from ejkernel_pallas.tpu.tiled_attention.visits import LAST, key_tile, key_visits, query_tile, query_visits


def backward(pullback: Pullback, params: TpuBackward) -> Gradients:
    """Gradients of the wanted fields of one device's record.

    Args:
        pullback: As for the pass by collectives, which serves what does not want query, key and value all three.
        params: As for tiled attention.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record, ring = pullback.record, ring_of(pullback.record)
    if ring is None or not pullback.wanted >= {"query", "key", "value"}:
        return collectives.backward(pullback, params)
    given = rows_of(pullback)
    plan, parts = Plan.of(record, ring), striped(given, ring)
    own = load_of(plan.record)
    met = plan.met(lax.axis_index(ring.axis_name), own)
    query, *home_ = _leg(plan, met, parts, params, range(0, ring.back + 1), None)
    if ring.ahead:
        moved = dataclasses.replace(met, **ring.shift({name: getattr(met, name) for name in own}, -1))
        query, *more = _leg(plan, moved, parts, params, range(-1, -ring.ahead - 1, -1), query)
        home_ = [one + other for one, other in zip(home_, more, strict=True)]
    grads = {"query": query, "key": home_[0], "value": home_[1]}
    if "softmax_aux" in pullback.wanted:
        grads["softmax_aux"] = sinks_gradient(dataclasses.replace(pullback, record=tiled(record)), given.products)
    return {name: home(grads[name], name, record, ring) for name in sorted(pullback.wanted)}


class Side(NamedTuple):
    """One of the two sweeps over a load: that which owns queries, or that which owns keys.

    Attributes:
        spec: The kernel's constants.
        inputs: What tiles are read from.
        results: What is read, added to, and written.
        visits: Table of all loads, int32 [loads, B|1, 1, steps].
        start: Where it begins in the table of both.
        scratch: What the kernel keeps between tiles.
        kernel: Called with the refs of a tile pair.
    """

    spec: Spec
    inputs: dict[str, Operand]
    results: dict[str, Operand]
    visits: Any
    start: int
    scratch: dict[str, Any]
    kernel: Callable[..., None]

    @property
    def prefix(self) -> str:
        """Of the names of its scratch memory, among those of both sweeps."""
        return "keys_" if self.spec.by_key else "queries_"

    @property
    def distinct(self) -> tuple[bool, bool]:
        """Whether batch rows have tile pairs of their own; heads have none."""
        return self.visits.shape[1] > 1, False

    def page(self, table: Any, number: Any) -> Any:
        """The visits of a load."""
        _, batch, _, steps = self.visits.shape
        return Page(table, self.start + number * (batch * steps))


class Page(NamedTuple):
    """A part of a table in scalar memory."""

    table: Any
    start: Any

    def __getitem__(self, at: Any) -> Any:
        return self.table[self.start + at]


def _sides(plan: Plan, met: TiledAttention, given: Rows, params: TpuBackward, hops: range) -> tuple[Side, Side]:
    by_key, by_query = backward_blocks(params)
    spec = plan.spec(met, by_query)
    zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in (("q", met.query), ("k", met.key), ("v", met.value))}
    visits = alone.tables(plan, spec, met, hops, key_visits)
    results = {"dquery": rows(zeros["q"], spec.q_block)}
    kept = scratch(spec, tuple(results), met.query.dtype)
    queries = Side(spec, inputs_of(met, given, spec), results, visits, 0, kept, queries_kernel)
    spec = plan.spec(met, by_key, by_key=True)
    results = {"dkey": kv_rows(zeros["k"], spec), "dvalue": kv_rows(zeros["v"], spec)}
    after = visits.size
    visits = alone.tables(plan, spec, met, hops, query_visits)
    kept = scratch(spec, tuple(results), met.query.dtype)
    return queries, Side(spec, inputs_of(met, given, spec), results, visits, after, kept, keys_kernel)


def _leg(
    plan: Plan, met: TiledAttention, given: Rows, params: TpuBackward, hops: range, query: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Gradients of queries, keys and values with the loads of one direction; those of keys are at home again."""
    queries, keys = _sides(plan, met, given, params, hops)
    if query is not None:
        queries = queries._replace(results={"dquery": rows(query, queries.spec.q_block)})
    inputs, results = queries.inputs, queries.results | keys.results
    route = alone.route_of(plan.ring, hops, inputs, cargo=("dkey", "dvalue"))
    slots = alone.slots_of(route.load, inputs) | alone.slots_of(route.cargo, results)
    kept = {side.prefix + name: x for side in (queries, keys) for name, x in side.scratch.items()}
    made = launch(
        Call(
            name="ejkernel_ring_backward_remote",
            kernel=functools.partial(_kernel, route=route, queries=queries, keys=keys),
            refs=functools.partial(alone.RemoteRefs.of, route, tuple(kept)),
            tables={
                "table": jnp.concatenate([queries.visits.reshape(-1), keys.visits.reshape(-1)]),
                "neighbours": alone.neighbours(plan.ring, hops),
            },
            inputs=alone.in_hbm(inputs | {"dquery_before": results["dquery"]} | keys.results),
            outputs=alone.in_hbm(queries.results) | slots,
            scratch=kept | route.scratch(),
            aliases={"dquery_before": "dquery"},
            pipelines=True,
            options=alone.remote_options(plan.ring, hops),
        )
    )
    last = (len(hops) - 1) % 2
    pairs = (("dkey_slots", met.key), ("dvalue_slots", met.value))
    cargo = (unrows(made[name][last], like.shape) for name, like in pairs)
    return unrows(made["dquery"], met.query.shape), *plan.ring.shift(tuple(cargo), -hops[-1])


def _kernel(refs: alone.RemoteRefs, *, route: Route, queries: Side, keys: Side) -> None:
    def work(number: Any, load: Arrays) -> None:
        _sweep(queries, queries.page(refs.table, number), refs, load)

    def collect(number: Any, load: Arrays) -> None:
        _sweep(keys, keys.page(refs.table, number), refs, load)

    route.walk(refs.load, refs.cargo, work, collect)


def _sweep(side: Side, page: Page, refs: alone.RemoteRefs, load: Arrays) -> None:
    """One pass over a load's tiles, with the next tiles on their way; adds to results where they lie."""
    spec, steps = side.spec, side.visits.shape[3]
    heads = (spec.heads // spec.group, steps, spec.group) if spec.by_key else (spec.heads, steps)
    scratch = {name: refs.scratch[side.prefix + name] for name in side.scratch}

    def where(b: Any, h: Any, step: Any, *member: Any) -> Any:
        at = page[(b if side.distinct[0] else 0) * steps + step]
        return b, h * spec.group + member[0] if member else h, query_tile(at), key_tile(at)

    def tile(named: Arrays) -> None:
        before = {name: named.pop(f"{name}_before") for name in side.results}
        side.kernel(BackwardRefs(table=page, **named, **scratch), spec=spec, distinct=side.distinct)
        last = (visited(page, side.distinct) & LAST) != 0
        _add_before(named, before, last & (pl.program_id(3) == spec.group - 1) if spec.by_key else last)

    grid = (side.inputs["query"].array.shape[0], *heads)
    alone.sweep(tile, refs, load, (side.inputs, side.results), grid, where)


def _add_before(named: Arrays, before: Arrays, done: Any) -> None:
    """Adds what earlier loads, or devices, found to what the kernel just wrote."""

    @pl.when(done)
    def _() -> None:
        for name, x in before.items():
            named[name][...] += x[...]
