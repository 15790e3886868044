"""Backward pass of ring attention on TPUs with collectives: keys travel around the ring together with their
gradients.

The kernels are those of tiled attention. They need the lse and `<cotangent, output>` of each whole row, which are known
after the forward pass, and write what they add to a gradient in float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.arithmetic import LOG2E
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import (
    Ring,
    TravellingKeys,
    columns,
    put_key_columns,
    ring_of,
    travelling_keys_of,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention, sinks_gradient
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import Operand, launch
from ejkernel_pallas.tpu.ring_attention.plan import RingPlan
from ejkernel_pallas.tpu.tiled_attention import backward as tiled_backward
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward, backward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dkv import key_gradients_call
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dq import query_gradient_call
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import (
    operands,
    per_query_operand,
    rows_operand,
    undo_rows_layout,
)
from ejkernel_pallas.tpu.tiled_attention.plan import pairs_by_key, pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

Gradients = dict[str, Any]


class QueryRows(NamedTuple):
    """Arrays per query of this device: cotangent and output [B, T, H, Dv]; lse, <cotangent, output> and delta [B, H,
    T].

    Delta is `<cotangent, output>` minus the cotangent of lse, `lse_cotangent`, which is None if there is none.
    """

    cotangent: jax.Array
    output: jax.Array
    lse: jax.Array
    cotangent_output_dots: jax.Array
    delta: jax.Array
    lse_cotangent: jax.Array | None


def backward(pullback: Pullback, config: TpuBackward) -> Gradients:
    """Returns gradients of the requested fields of one device's record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names among query, key, value, bias,
            score_mod and softmax_aux.
        config: As for tiled attention.

    Returns:
        Each requested gradient, in its field's shape and dtype. Gradients of key and value are of the device's own
        shard, and complete; those of bias, score_mod and softmax_aux are the contributions of the device's queries.
    """
    record = pullback.record
    ring = ring_of(record)
    if ring is None:
        return tiled_backward.backward(dataclasses.replace(pullback, record=as_tiled_attention(record)), config)
    query_rows = make_query_rows(pullback)
    grads = _ring_gradients(
        RingPlan.of(record, ring), stripe_query_rows(query_rows, ring), config, pullback.grad_fields - {"softmax_aux"}
    )
    if "softmax_aux" in pullback.grad_fields:
        grads["softmax_aux"] = sinks_gradient(
            dataclasses.replace(pullback, record=as_tiled_attention(record)), query_rows.cotangent_output_dots
        )
    return {name: unstriped_gradient(grads[name], name, record, ring) for name in sorted(pullback.grad_fields)}


def make_query_rows(pullback: Pullback) -> QueryRows:
    """Returns what the gradients need of every query's whole row."""
    record, cotangent = pullback.record, pullback.cotangent
    # the cotangent of padding may be anything
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        cotangent = jnp.where((record.q_segment_ids >= 0)[:, :, None, None], cotangent, 0)
    products = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    delta = tiled_backward.delta_without_padding(products, pullback, record.q_segment_ids)
    cotangent, lse_cotangent = cotangent.astype(record.query.dtype), pullback.lse_cotangent
    return QueryRows(cotangent, pullback.output, pullback.residuals.lse, products, delta, lse_cotangent)


def stripe_query_rows(query_rows: QueryRows, ring: Ring) -> QueryRows:
    """Returns the rows of the queries that this device computes, in the ring's layout."""
    return QueryRows(
        cotangent=ring.stripe(query_rows.cotangent, 1),
        output=ring.stripe(query_rows.output, 1),
        lse=ring.stripe(query_rows.lse, 2),
        cotangent_output_dots=ring.stripe(query_rows.cotangent_output_dots, 2),
        delta=ring.stripe(query_rows.delta, 2),
        lse_cotangent=None if query_rows.lse_cotangent is None else ring.stripe(query_rows.lse_cotangent, 2),
    )


def _ring_gradients(
    plan: RingPlan, query_rows: QueryRows, config: TpuBackward, grad_fields: frozenset[str]
) -> Gradients:
    """Returns the gradients of all fields except sinks, in the layout of the ring's computation, float32."""
    record, ring = plan.record, plan.ring
    # Gradients are float32 until the end: every device adds a part, and each rounding to 16 bits would add an error.
    zeros = {name: jax.tree.map(_float32_zeros, getattr(record, name)) for name in sorted(grad_fields)}
    zeros = _compat.as_varying(zeros, (record, query_rows))
    # Gradients of keys and values travel with their keys, and are complete when they are back at their own device;
    # those of queries stay.
    travelling = {name: zeros[name] for name in ("key", "value") if name in zeros}
    local_gradients = {name: x for name, x in zeros.items() if name not in travelling}

    def ring_step(
        source: jax.Array, load: TravellingKeys, local_gradients: Gradients
    ) -> tuple[TravellingKeys, Gradients]:
        added = _gradients_of_ring_step(plan, source, load, query_rows, config, grad_fields)
        if "bias" in local_gradients:
            keys = load["key"].shape[1]
            sum_ = columns(local_gradients["bias"], ring, source, keys) + added["bias"]
            added["bias"] = put_key_columns(local_gradients["bias"], sum_, ring, source, keys)
        for name, before in local_gradients.items():  # in one order, as all hosts must have the same program
            if name != "bias":
                added[name] = jax.tree.map(jnp.add, before, added[name])
        return {name: added[name] for name in travelling}, {name: added[name] for name in local_gradients}

    collected, stationary = ring.run_ring(travelling_keys_of(record), travelling, ring_step, local_gradients)
    return {**collected, **stationary}


def _gradients_of_ring_step(
    plan: RingPlan,
    source: jax.Array,
    load: TravellingKeys,
    query_rows: QueryRows,
    config: TpuBackward,
    grad_fields: frozenset[str],
) -> Gradients:
    """Returns what one load of keys adds to the gradients, float32."""
    shard_record, (key_blocks, query_blocks) = plan.make_shard_record(source, load), backward_blocks(config)
    added: Gradients = {}
    if grad_fields & {"key", "value"}:
        spec = plan.spec(shard_record, key_blocks, accumulates_for_keys=True)
        table = plan.tile_pairs(shard_record, spec, source, pairs_by_key)
        added |= _key_gradients(shard_record, query_rows, spec, table, grad_fields & {"key", "value"})
    if "query" in grad_fields:
        spec = plan.spec(shard_record, query_blocks)
        added["query"] = _query_gradient(
            shard_record, query_rows, spec, plan.tile_pairs(shard_record, spec, source, pairs_by_query)
        )
    if "bias" in grad_fields:
        added["bias"] = _bias_gradient(plan, shard_record, source, query_rows, config)
    if "score_mod" in grad_fields:
        added["score_mod"] = _function_gradient(shard_record, query_rows, config)
    return added


def _key_gradients(
    shard_record: TiledAttention, query_rows: QueryRows, spec: TiledSpec, table: Any, grad_fields: frozenset[str]
) -> Gradients:
    fields = {name: getattr(shard_record, name) for name in sorted(grad_fields)}
    shapes = {f"d{name}": _float32_shape_of(x) for name, x in fields.items()}
    results = launch(
        key_gradients_call(
            "ejkernel_ring_backward_keys", table, ring_step_operands(shard_record, query_rows, spec), shapes, spec
        )
    )
    return {name: undo_rows_layout(results[f"d{name}"], x.shape) for name, x in fields.items()}


def _query_gradient(shard_record: TiledAttention, query_rows: QueryRows, spec: TiledSpec, table: Any) -> jax.Array:
    inputs, shape = ring_step_operands(shard_record, query_rows, spec), _float32_shape_of(shard_record.query)
    results = launch(query_gradient_call("ejkernel_ring_backward_queries", table, inputs, shape, spec))
    return undo_rows_layout(results["dquery"], shape.shape)


def _bias_gradient(
    plan: RingPlan, shard_record: TiledAttention, source: jax.Array, query_rows: QueryRows, config: TpuBackward
) -> jax.Array:
    """Returns the gradient of a bias's columns, with the kernel of tiled attention, which writes each tile once."""
    pullback = _pullback(plan.add_shard_positions(shard_record, source), query_rows, "bias")
    return tiled_backward.backward(pullback, config)["bias"].astype(jnp.float32)


def _function_gradient(shard_record: TiledAttention, query_rows: QueryRows, config: TpuBackward) -> Any:
    """Returns the gradients of the arrays of `score_mod`, in its place, float32; those of integers are None."""
    function = shard_record.score_mod
    assert function is not None  # its gradient was requested
    wide = tuple(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in function.captured)
    record = dataclasses.replace(shard_record, score_mod=dataclasses.replace(function, captured=wide))
    return tiled_backward.backward(_pullback(record, query_rows, "score_mod"), config)["score_mod"]


def _pullback(shard_record: TiledAttention, query_rows: QueryRows, field: str) -> Pullback:
    """Returns the pullback of tiled attention for one field of a ring step."""
    return Pullback(
        record=shard_record,
        residuals=SoftmaxResiduals(lse=query_rows.lse),
        output=query_rows.output,
        cotangent=query_rows.cotangent,
        lse_cotangent=query_rows.lse_cotangent,
        grad_fields=frozenset({field}),
    )


def ring_step_operands(shard_record: TiledAttention, query_rows: QueryRows, spec: TiledSpec) -> dict[str, Operand]:
    """Returns the operands of a ring step: its keys, and its queries' rows."""
    lse = query_rows.lse
    return operands(shard_record, spec) | {
        "cotangent": rows_operand(query_rows.cotangent, spec.block_q),
        "log2_lse": per_query_operand(jnp.where(lse == -jnp.inf, 0, lse) * LOG2E, spec),
        "delta": per_query_operand(query_rows.delta, spec),
    }


def _float32_zeros(x: jax.Array) -> jax.Array | None:
    """Returns zeros for the gradient of an array; None for the integers of a function, which have none."""
    return jnp.zeros(x.shape, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else None


def _float32_shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32)


def unstriped_gradient(gradient: Any, name: str, record: RingAttention, ring: Ring) -> Any:
    """Returns a gradient in its field's dtype and layout."""
    field = getattr(record, name)
    gradient = jax.tree.map(lambda x, g: None if g is None else g.astype(x.dtype), field, gradient)
    axis = {"query": 1, "key": 1, "value": 1, "bias": 2}.get(name)
    return gradient if axis is None or field.shape[axis] == 1 else ring.unstripe(gradient, axis)
