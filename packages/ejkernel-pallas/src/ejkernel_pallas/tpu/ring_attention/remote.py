"""Forward pass of ring attention in one kernel a device, which itself sends keys on while it works on them."""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.planning.ring_schedule import load_of, ring_of
from ejkernel_pallas.tpu.mosaic.launch import Call, Operand, launch
from ejkernel_pallas.tpu.ring_attention import alone
from ejkernel_pallas.tpu.ring_attention.forward import State, states
from ejkernel_pallas.tpu.ring_attention.neighbours import Arrays, Route
from ejkernel_pallas.tpu.ring_attention.plan import Plan, beginning
from ejkernel_pallas.tpu.ring_attention.softmax import RingForwardRefs, continue_softmax
from ejkernel_pallas.tpu.tiled_attention import forward_kernel
from ejkernel_pallas.tpu.tiled_attention.operands import operands, unrows
from ejkernel_pallas.tpu.tiled_attention.spec import Spec
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuForward, forward_blocks
from ejkernel_pallas.tpu.tiled_attention.visits import key_tile, key_visits, query_tile


def forward(record: RingAttention, params: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments, of a part of whole tiles.
        params: As for tiled attention.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of(record)
    assert ring is not None  # what the implementation requires says so
    plan = Plan.of(record, ring)
    me, own = lax.axis_index(ring.axis_name), load_of(plan.record)
    met = plan.met(me, own)
    spec, state = plan.spec(met, forward_blocks(params)), _compat.as_varying(beginning(record), record)
    state = _leg(plan, spec, met, state, range(0, ring.back + 1))
    if ring.ahead:
        moved = dataclasses.replace(met, **ring.shift({name: getattr(met, name) for name in own}, -1))
        state = _leg(plan, spec, moved, state, range(-1, -ring.ahead - 1, -1))
    output = ring.unstripe(state[0].astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(state[1], 2))


def _leg(plan: Plan, spec: Spec, met: TiledAttention, state: State, hops: range) -> State:
    """The state with the loads of one direction, the first of which is met's."""
    visits, inputs, results = alone.tables(plan, spec, met, hops, key_visits), operands(met, spec), states(state, spec)
    route = alone.route_of(plan.ring, hops, inputs)
    scratch = forward_kernel.scratch(spec, met.value.dtype)
    work = _Work(spec=spec, inputs=inputs, results=results, visits=visits.shape)
    made = launch(
        Call(
            name="ejkernel_ring_forward_remote",
            kernel=functools.partial(_kernel, route=route, work=work),
            refs=functools.partial(alone.RemoteRefs.of, route, tuple(scratch)),
            tables={"table": visits.reshape(-1), "neighbours": alone.neighbours(plan.ring, hops)},
            inputs=alone.in_hbm(inputs | {f"{name}_before": x for name, x in results.items()}),
            outputs=alone.in_hbm(results) | alone.slots_of(route.load, inputs),
            scratch=scratch | route.scratch(),
            aliases={f"{name}_before": name for name in results},
            pipelines=True,
            options=alone.remote_options(plan.ring, hops),
        )
    )
    return unrows(made["output"], state[0].shape), made["lse"].reshape(state[1].shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """The tiles of a load.

    Attributes:
        spec: The kernels' constants.
        inputs: What tiles are read from.
        results: What is read and written.
        visits: Shape of the table.
    """

    spec: Spec
    inputs: dict[str, Operand]
    results: dict[str, Operand]
    visits: tuple[int, ...]

    def __call__(self, refs: alone.RemoteRefs, number: Any, load: Arrays) -> None:
        """Takes a load into the state, tile by tile, with the next tiles on their way."""
        (_, batched, _, steps), spec = self.visits, self.spec

        def entry(b: Any, step: Any) -> Any:
            return refs.table[(number * batched + (b if batched > 1 else 0)) * steps + step]

        def where(b: Any, h: Any, step: Any) -> Any:
            at = entry(b, step)
            return b, h, query_tile(at), key_tile(at)

        def tile(named: Arrays) -> None:
            own = RingForwardRefs(table=refs.table, **named, **refs.scratch)
            continue_softmax(entry(pl.program_id(0), pl.program_id(2)), own, spec)

        grid = (self.results["lse"].array.shape[0], spec.heads, steps)
        alone.sweep(tile, refs, load, (self.inputs, self.results), grid, where)


def _kernel(refs: alone.RemoteRefs, *, route: Route, work: _Work) -> None:
    route.walk(refs.load, None, lambda number, load: work(refs, number, load), lambda number, load: None)
