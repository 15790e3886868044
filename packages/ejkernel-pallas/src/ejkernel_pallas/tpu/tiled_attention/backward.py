"""Backward pass of tiled softmax attention on TPUs, by recomputation of the weights (Dao et al. 2022).

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i)
    dbias   = ds through score_mod and the soft cap; that of an array in score_mod is summed over the pairs that read it
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

XLA computes delta and the sink's gradient, which are sums over rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, sinks_gradient, subtract_lse_cotangent
from ejkernel.families.tiled_attention.record import indices_in_call
from ejkernel.types.pair_functions import PairFunction
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import Operand, launch
from ejkernel_pallas.tpu.mosaic.split_functions import row_values
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward, backward_blocks
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dbias import bias_gradient, sum_of_score_gradients
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dkv import key_gradients_call
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_backward_dq import query_gradient_call
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import (
    canonical_record,
    operands,
    per_query_operand,
    rows_operand,
    undo_rows_layout,
)
from ejkernel_pallas.tpu.tiled_attention.plan import pair_flags, pairs_by_key, pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.spec import MASKED_SCORE, TiledSpec, TileSizes, make_spec

Gradients = dict[str, Any]
QueryRows = tuple[jax.Array, jax.Array, jax.Array]


def backward(pullback: Pullback, config: TpuBackward) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the names of the requested fields.
        config: Tile sizes of the kernels that accumulate for keys and for queries.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    (by_key, by_query), record, grad_fields = (
        backward_blocks(config),
        canonical_record(pullback.record),
        pullback.grad_fields,
    )
    cotangent, shift, products = _make_query_rows(pullback, record)
    query_rows = cotangent, shift, delta_without_padding(products, pullback, record.q_segment_ids)
    gradients: Gradients = {}
    if grad_fields & {"key", "value"}:
        gradients |= _key_gradients(
            record, query_rows, make_spec(record, by_key, accumulates_for_keys=True), grad_fields
        )
    if "query" in grad_fields:
        gradients["query"] = _query_gradient(record, query_rows, make_spec(record, by_query))
    if "bias" in grad_fields:
        gradients["bias"] = _bias_gradient(record, query_rows)
    if "score_mod" in grad_fields:
        gradients["score_mod"] = _gradients_of_captured_arrays(record, query_rows)
    if "softmax_aux" in grad_fields:
        gradients["softmax_aux"] = sinks_gradient(pullback, products)
    return {name: gradients[name] for name in sorted(grad_fields)}


def _make_query_rows(pullback: Pullback, record: TiledAttention) -> QueryRows:
    """Returns, for every query, the cotangent [B, T, H, Dv], lse as a power of two and <do, o>, both [B, H, T]."""
    lse, cotangent = pullback.residuals.lse, pullback.cotangent.astype(record.query.dtype)
    if record.q_segment_ids is not None:  # the cotangent of padding may be anything
        cotangent = jnp.where((record.q_segment_ids >= 0)[:, :, None, None], cotangent, 0)
    delta = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    # A row that attends nothing has lse = -inf; any finite value can replace it, since all of the row's pairs are
    # masked.
    return cotangent, jnp.maximum(jnp.where(lse == -jnp.inf, 0, lse) * LOG2E, MASKED_SCORE), delta


def delta_without_padding(
    cotangent_output_dots: jax.Array, pullback: Pullback, q_segment_ids: jax.Array | None
) -> jax.Array:
    """Returns delta [B, H, T] for the kernels from <do, o>; padding (negative segment ids) gets a finite value."""
    if pullback.lse_cotangent is None:
        return cotangent_output_dots
    delta = subtract_lse_cotangent(cotangent_output_dots, pullback)
    return delta if q_segment_ids is None else jnp.where(q_segment_ids[:, None] >= 0, delta, 0)


def _backward_operands(record: TiledAttention, query_rows: QueryRows, spec: TiledSpec) -> dict[str, Operand]:
    cotangent, shift, delta = query_rows
    return operands(record, spec) | {
        "cotangent": rows_operand(cotangent, spec.block_q),
        "log2_lse": per_query_operand(shift, spec),
        "delta": per_query_operand(delta, spec),
    }


def _key_gradients(
    record: TiledAttention, query_rows: QueryRows, spec: TiledSpec, grad_fields: frozenset[str]
) -> Gradients:
    fields = {name: getattr(record, name) for name in ("key", "value") if name in grad_fields}
    shapes = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in fields.items()}
    inputs, table = _backward_operands(record, query_rows, spec), pairs_by_key(record, spec)
    gradients = launch(key_gradients_call("ejkernel_attention_backward_keys", table, inputs, shapes, spec))
    return {name: undo_rows_layout(gradients[f"d{name}"], x.shape) for name, x in fields.items()}


def _query_gradient(record: TiledAttention, query_rows: QueryRows, spec: TiledSpec) -> jax.Array:
    query = record.query
    inputs, table = _backward_operands(record, query_rows, spec), pairs_by_query(record, spec)
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    gradients = launch(query_gradient_call("ejkernel_attention_backward_queries", table, inputs, shape, spec))
    return undo_rows_layout(gradients["dquery"], query.shape)


def _bias_gradient(record: TiledAttention, query_rows: QueryRows) -> jax.Array:
    spec = make_spec(record, TileSizes(256, 256, 256, 256))
    return bias_gradient(record, pair_flags(record, spec), _backward_operands(record, query_rows, spec), spec)


def _gradients_of_captured_arrays(record: TiledAttention, query_rows: QueryRows) -> PairFunction:
    """Returns the gradients of the arrays that `score_mod` closes over, in its place; those of integers are None.

    The kernels sum the gradients of the rows, one row at a time, and XLA differentiates the rows by the arrays.
    """
    spec, function = make_spec(record, TileSizes(256, 256, 256, 256)), record.score_mod
    assert function is not None  # its gradient was requested
    assert spec.score_mod is not None
    split, flags, inputs = spec.score_mod, pair_flags(record, spec), _backward_operands(record, query_rows, spec)
    floating = {n: x for n, x in enumerate(function.captured) if jnp.issubdtype(x.dtype, jnp.floating)}
    rows = [n for n, row in enumerate(split.rows) if row.has_gradient]

    def values(floating: dict[int, jax.Array]) -> list[jax.Array]:
        captured = tuple(floating.get(n, x) for n, x in enumerate(function.captured))
        changed = dataclasses.replace(function, captured=captured)
        return row_values(changed, [split.rows[n] for n in rows], indices_in_call(record))

    # The sums over queries and keys need the digits of float32.
    primals, pull = jax.vjp(values, {n: x.astype(jnp.float32) for n, x in floating.items()})
    cotangents = [
        sum_of_score_gradients(record, x.shape, flags, inputs, dataclasses.replace(spec, differentiated_row=n))
        for n, x in zip(rows, primals, strict=True)
    ]
    (found,) = pull([x.astype(primal.dtype) for x, primal in zip(cotangents, primals, strict=True)])
    gradients = [found[n].astype(x.dtype) if n in found else None for n, x in enumerate(function.captured)]
    return dataclasses.replace(function, captured=tuple(gradients))
