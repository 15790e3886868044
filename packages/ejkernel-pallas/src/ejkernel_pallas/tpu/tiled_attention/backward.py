"""Backward pass of tiled softmax attention on TPUs, by recomputation of the weights (Dao et al. 2022).

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i)
    dbias   = ds through the soft cap
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

Delta and the sink's gradient are sums over rows that XLA is left to do.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.tiled_attention import TiledAttention, less_lse_cotangent, sinks_gradient
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.tiled_attention.backward_kernels import bias_kernel, keys_kernel, queries_kernel
from ejkernel_pallas.tpu.tiled_attention.call import pairs_call
from ejkernel_pallas.tpu.tiled_attention.operands import canonical, kv_rows, of_queries, operands, rows, unrows
from ejkernel_pallas.tpu.tiled_attention.pair_table import pair_flags, pairs_by_key, pairs_by_query
from ejkernel_pallas.tpu.tiled_attention.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.spec import LOG2E, LOWEST, Blocks, TiledSpec, make_spec, padded
from ejkernel_pallas.tpu.tiled_attention.tile import double_buffer, dropout_scratch
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuBackward, backward_blocks

Gradients = dict[str, jax.Array]
Rows = tuple[jax.Array, jax.Array, jax.Array]


def backward(pullback: Pullback, params: TpuBackward) -> Gradients:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the wanted names.
        params: Tile sizes of the kernels that accumulate for keys and for queries.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    (by_key, by_query), record, wanted = backward_blocks(params), canonical(pullback.record), pullback.wanted
    cotangent, shift, products = _rows(pullback, record)
    rows_of = cotangent, shift, delta_of(products, pullback, record.q_segment_ids)
    gradients: Gradients = {}
    if wanted & {"key", "value"}:
        gradients |= _of_keys(record, rows_of, make_spec(record, by_key, by_key=True), wanted)
    if "query" in wanted:
        gradients["query"] = _of_queries(record, rows_of, make_spec(record, by_query))
    if "bias" in wanted:
        gradients["bias"] = _of_bias(record, rows_of, make_spec(record, Blocks(256, 256, 256, 256)))
    if "softmax_aux" in wanted:
        gradients["softmax_aux"] = sinks_gradient(pullback, products)
    return {name: gradients[name] for name in sorted(wanted)}


def _rows(pullback: Pullback, record: TiledAttention) -> Rows:
    """Computes, for every query, cotangent [B, T, H, Dv], lse in powers of two and <do, o>, both [B, H, T]."""
    lse, cotangent = pullback.residuals.lse, pullback.cotangent.astype(record.query.dtype)
    if record.q_segment_ids is not None:  # padding's cotangent may be anything
        cotangent = jnp.where((record.q_segment_ids >= 0)[:, :, None, None], cotangent, 0)
    delta = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    # A row that attends nothing has lse = -inf; any finite shift serves, as all of its pairs are masked.
    return cotangent, jnp.maximum(jnp.where(lse == -jnp.inf, 0, lse) * LOG2E, LOWEST), delta


def delta_of(products: jax.Array, pullback: Pullback, ids: jax.Array | None) -> jax.Array:
    """The kernels' delta, [B, H, T], out of <do, o>: a number for padding too, whose segment ids are negative."""
    if pullback.lse_cotangent is None:
        return products
    delta = less_lse_cotangent(products, pullback)
    return delta if ids is None else jnp.where(ids[:, None] >= 0, delta, 0)


def _inputs(record: TiledAttention, rows_of: Rows, spec: TiledSpec) -> dict[str, Operand]:
    cotangent, shift, delta = rows_of
    return operands(record, spec) | {
        "cotangent": rows(cotangent, spec.block_q),
        "shift": of_queries(shift, spec),
        "delta": of_queries(delta, spec),
    }


def keys_call(name: str, table: Any, inputs: dict[str, Operand], shapes: dict[str, Any], spec: TiledSpec) -> KernelCall:
    """The kernel of the gradients of keys and values.

    Args:
        name: The kernel's.
        table: Tile pairs by key tile, int32 [B|1, Hk|1, steps].
        inputs: What it reads.
        shapes: Shape and dtype of each gradient that is wanted, `"dkey"` and `"dvalue"`.
        spec: The kernel's constants.
    """
    outputs = {field: kv_rows(x, spec) for field, x in shapes.items()}
    kept = scratch(spec, tuple(shapes), inputs["query"].array.dtype)
    return pairs_call(name, keys_kernel, BackwardRefs, table, spec, inputs, outputs, kept)


def queries_call(name: str, table: Any, inputs: dict[str, Operand], dquery: Any, spec: TiledSpec) -> KernelCall:
    """The kernel of the queries' gradient, of which `dquery` is shape and dtype; the others as of `keys_call`."""
    outputs, kept = {"dquery": rows(dquery, spec.block_q)}, scratch(spec, ("dquery",), inputs["query"].array.dtype)
    return pairs_call(name, queries_kernel, BackwardRefs, table, spec, inputs, outputs, kept)


def _of_keys(record: TiledAttention, rows_of: Rows, spec: TiledSpec, wanted: frozenset[str]) -> Gradients:
    fields = {name: getattr(record, name) for name in ("key", "value") if name in wanted}
    shapes = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in fields.items()}
    inputs, table = _inputs(record, rows_of, spec), pairs_by_key(record, spec)
    made = launch(keys_call("ejkernel_attention_backward_keys", table, inputs, shapes, spec))
    return {name: unrows(made[f"d{name}"], x.shape) for name, x in fields.items()}


def _of_queries(record: TiledAttention, rows_of: Rows, spec: TiledSpec) -> jax.Array:
    query = record.query
    inputs, table = _inputs(record, rows_of, spec), pairs_by_query(record, spec)
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    made = launch(queries_call("ejkernel_attention_backward_queries", table, inputs, shape, spec))
    return unrows(made["dquery"], query.shape)


def _of_bias(record: TiledAttention, rows_of: Rows, spec: TiledSpec) -> jax.Array:
    """The bias's gradient; a sum over what the bias is shared by is made tile by tile, so nothing larger is."""
    bias, kinds = record.bias, pair_flags(record, spec)
    assert bias is not None  # a gradient of it was asked for
    q_tiles, k_tiles = kinds.shape[2:]
    counts = (record.query.shape[0], record.query.shape[2], q_tiles, k_tiles)
    # Axes that the bias has are walked outside, those that it is broadcast along inside, for one sum a tile.
    outer = tuple(n if size > 1 else 1 for n, size in zip(counts, bias.shape, strict=True))
    parts = tuple(n // k for n, k in zip(counts, outer, strict=True))
    result, acc = _bias_tiles(bias, spec)
    made = launch(
        KernelCall(
            name="ejkernel_attention_backward_bias",
            kernel=functools.partial(bias_kernel, spec=spec, tiles=kinds.shape),
            refs=BackwardRefs,
            grid=(*outer, *parts),
            parallel=2,
            tables={"table": kinds.reshape(-1)},
            inputs=_inputs(record, rows_of, spec),
            outputs={"dbias": result},
            scratch={"dbias_acc": pltpu.VMEM(acc, jnp.float32), **scratch(spec, (), record.query.dtype)},
            where=lambda *step: (step[0] + step[4], step[1] + step[5], step[2] + step[6], step[3] + step[7]),
        )
    )["dbias"]
    if bias.shape[3] == 1:  # as a row, of queries or, where it is one number, of keys
        made = made.sum(axis=3, keepdims=True) if bias.shape[2] == 1 else made.swapaxes(2, 3)
    return made.astype(bias.dtype)


def _bias_tiles(bias: jax.Array, spec: TiledSpec) -> tuple[Operand, tuple[int, int]]:
    """The gradient's array and the shape of the sum that becomes a tile of it."""
    batch, heads, queries, keys = bias.shape
    if queries > 1 and keys > 1:
        block = (spec.block_q, spec.block_kv)
        return _bias_operand(jax.ShapeDtypeStruct(bias.shape, jnp.float32), block, bias, lambda i, j: (i, j)), block
    if queries > 1:
        array = jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32)
        return _bias_operand(array, (1, spec.block_q), bias, lambda i, j: (0, i)), (spec.block_q, LANES)
    array = jax.ShapeDtypeStruct((batch, heads, 1, keys if keys > 1 else spec.block_kv), jnp.float32)
    return _bias_operand(array, (1, spec.block_kv), bias, lambda i, j: (0, j if keys > 1 else 0)), (1, spec.block_kv)


def scratch(spec: TiledSpec, results: tuple[str, ...], dtype: Any) -> dict[str, Any]:
    """Scratch memory of a backward kernel; `dtype` is that of queries.

    Accumulators of results, statistics of queries where scores have these in sublanes, and two products of chunks.
    """
    sizes = {"dquery": spec.head_dim, "dkey": spec.head_dim, "dvalue": spec.value_dim}
    stationary = spec.block_kv if spec.by_key else spec.block_q
    chunk = (spec.chunk_kv, spec.chunk_q) if spec.by_key else (spec.chunk_q, spec.chunk_kv)
    columns = () if spec.by_key else ("shift_column", "delta_column")
    return {
        **{f"{name}_acc": pltpu.VMEM((stationary, padded(sizes[name])), jnp.float32) for name in results},
        **{name: pltpu.VMEM((spec.block_q, LANES), jnp.float32) for name in columns},
        "weights": double_buffer(chunk, jnp.float32),
        "dscores": double_buffer(chunk, dtype),
        **dropout_scratch(spec),
    }


def _bias_operand(array: Any, block: tuple[int, int], bias: jax.Array, place: Any) -> Operand:
    batch, heads = bias.shape[0] > 1, bias.shape[1] > 1
    return Operand(array, (None, None, *block), lambda b, h, i, j: (b if batch else 0, h if heads else 0, *place(i, j)))
