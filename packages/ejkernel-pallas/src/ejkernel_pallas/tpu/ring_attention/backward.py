"""Backward pass of ring attention on TPUs: keys travel by collectives, their gradients with them.

The kernels are those of tiled attention. Of the whole row they need its lse and `<cotangent, output>`, which are there
from the forward pass; what they add to a gradient they leave in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention, tiled
from ejkernel.families.ring_attention.schedule import Load, Ring, columns, load_of, put_columns, ring_of
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention, sinks_gradient
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import Operand, launch
from ejkernel_pallas.tpu.ring_attention.ring_plan import RingPlan
from ejkernel_pallas.tpu.tiled_attention import backward as tiles
from ejkernel_pallas.tpu.tiled_attention.operands import of_queries, operands, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.pair_table import pairs_by_key, pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import LOG2E, TiledSpec
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuBackward, backward_blocks

Gradients = dict[str, jax.Array]


class Rows(NamedTuple):
    """Of every query of this device: cotangent and output [B, T, H, Dv]; lse, <cotangent, output> and delta [B, H, T].

    Delta is less the cotangent of lse, `of_lse`, which is None where there is none.
    """

    cotangent: jax.Array
    output: jax.Array
    lse: jax.Array
    products: jax.Array
    delta: jax.Array
    of_lse: jax.Array | None


def backward(pullback: Pullback, params: TpuBackward) -> Gradients:
    """Gradients of the wanted fields of one device's record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the wanted names, of query, key, value, bias and
            softmax_aux.
        params: As for tiled attention.

    Returns:
        Each wanted gradient, in its field's shape and dtype. Those of key and value are of the device's own part, and
        complete; those of bias and softmax_aux are what the device's queries contribute.
    """
    record = pullback.record
    ring = ring_of(record)
    if ring is None:
        return tiles.backward(dataclasses.replace(pullback, record=tiled(record)), params)
    given = rows_of(pullback)
    grads = _around(RingPlan.of(record, ring), striped(given, ring), params, pullback.wanted - {"softmax_aux"})
    if "softmax_aux" in pullback.wanted:
        grads["softmax_aux"] = sinks_gradient(dataclasses.replace(pullback, record=tiled(record)), given.products)
    return {name: home(grads[name], name, record, ring) for name in sorted(pullback.wanted)}


def rows_of(pullback: Pullback) -> Rows:
    """What the gradients need of every query's whole row."""
    record, cotangent = pullback.record, pullback.cotangent
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:  # padding's cotangent may be anything
        cotangent = jnp.where((record.q_segment_ids >= 0)[:, :, None, None], cotangent, 0)
    products = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    delta = tiles.delta_of(products, pullback, record.q_segment_ids)
    cotangent, of_lse = cotangent.astype(record.query.dtype), pullback.lse_cotangent
    return Rows(cotangent, pullback.output, pullback.residuals.lse, products, delta, of_lse)


def striped(given: Rows, ring: Ring) -> Rows:
    """The rows of the queries that this device works on."""
    return Rows(
        cotangent=ring.stripe(given.cotangent, 1),
        output=ring.stripe(given.output, 1),
        lse=ring.stripe(given.lse, 2),
        products=ring.stripe(given.products, 2),
        delta=ring.stripe(given.delta, 2),
        of_lse=None if given.of_lse is None else ring.stripe(given.of_lse, 2),
    )


def _around(plan: RingPlan, given: Rows, params: TpuBackward, wanted: frozenset[str]) -> Gradients:
    """The gradients of everything but sinks, in the layout that the ring works in, float32."""
    record, ring = plan.record, plan.ring
    # float32 until the end: every device adds a part, and each rounding to 16 bits would count.
    zeros = {name: jnp.zeros(getattr(record, name).shape, jnp.float32) for name in wanted}
    zeros = _compat.as_varying(zeros, (record, given))
    # Gradients of keys and values go around with their keys, and are complete when these are home; those of queries
    # stay.
    travelling = {name: zeros[name] for name in ("key", "value") if name in zeros}
    staying = {name: x for name, x in zeros.items() if name not in travelling}

    def ring_step(source: jax.Array, load: Load, staying: Gradients) -> tuple[Load, Gradients]:
        added = _step(plan, source, load, given, params, wanted)
        if "bias" in staying:
            keys = load["key"].shape[1]
            sum_ = columns(staying["bias"], ring, source, keys) + added["bias"]
            added["bias"] = put_columns(staying["bias"], sum_, ring, source, keys)
        if "query" in staying:
            added["query"] = staying["query"] + added["query"]
        return {name: added[name] for name in travelling}, {name: added[name] for name in staying}

    collected, kept = ring.walk(load_of(record), travelling, ring_step, staying)
    return {**collected, **kept}


def _step(
    plan: RingPlan, source: jax.Array, load: Load, given: Rows, params: TpuBackward, wanted: frozenset[str]
) -> Gradients:
    """What one load of keys adds to the gradients, float32."""
    shard, (by_key, by_query) = plan.shard(source, load), backward_blocks(params)
    added: Gradients = {}
    if wanted & {"key", "value"}:
        spec = plan.spec(shard, by_key, by_key=True)
        table = plan.pairs(shard, spec, source, pairs_by_key)
        added |= _of_keys(shard, given, spec, table, wanted & {"key", "value"})
    if "query" in wanted:
        spec = plan.spec(shard, by_query)
        added["query"] = _of_queries(shard, given, spec, plan.pairs(shard, spec, source, pairs_by_query))
    if "bias" in wanted:
        added["bias"] = _of_bias(plan, shard, source, given, params)
    return added


def _of_keys(shard: TiledAttention, given: Rows, spec: TiledSpec, table: Any, wanted: frozenset[str]) -> Gradients:
    fields = {name: getattr(shard, name) for name in sorted(wanted)}
    shapes = {f"d{name}": _float32(x) for name, x in fields.items()}
    made = launch(tiles.keys_call("ejkernel_ring_backward_keys", table, inputs_of(shard, given, spec), shapes, spec))
    return {name: unrows(made[f"d{name}"], x.shape) for name, x in fields.items()}


def _of_queries(shard: TiledAttention, given: Rows, spec: TiledSpec, table: Any) -> jax.Array:
    inputs, shape = inputs_of(shard, given, spec), _float32(shard.query)
    made = launch(tiles.queries_call("ejkernel_ring_backward_queries", table, inputs, shape, spec))
    return unrows(made["dquery"], shape.shape)


def _of_bias(plan: RingPlan, shard: TiledAttention, source: jax.Array, given: Rows, params: TpuBackward) -> jax.Array:
    """The gradient of a bias's columns, which tiled attention has a kernel for: its tiles are written once."""
    pullback = Pullback(
        record=plan.placed(shard, source),
        residuals=SoftmaxResiduals(lse=given.lse),
        output=given.output,
        cotangent=given.cotangent,
        lse_cotangent=given.of_lse,
        wanted=frozenset({"bias"}),
    )
    return tiles.backward(pullback, params)["bias"].astype(jnp.float32)


def inputs_of(shard: TiledAttention, given: Rows, spec: TiledSpec) -> dict[str, Operand]:
    """What kernels read of a ring step, and of its queries' rows."""
    lse = given.lse
    return operands(shard, spec) | {
        "cotangent": rows(given.cotangent, spec.block_q),
        "shift": of_queries(jnp.where(lse == -jnp.inf, 0, lse) * LOG2E, spec),
        "delta": of_queries(given.delta, spec),
    }


def _float32(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def home(gradient: jax.Array, name: str, record: RingAttention, ring: Ring) -> jax.Array:
    """A gradient in its field's dtype and layout."""
    field = getattr(record, name)
    gradient = gradient.astype(field.dtype)
    axis = {"query": 1, "key": 1, "value": 1, "bias": 2}.get(name)
    return gradient if axis is None or field.shape[axis] == 1 else ring.unstripe(gradient, axis)
