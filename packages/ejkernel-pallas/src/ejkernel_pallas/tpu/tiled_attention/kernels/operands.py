"""Describes a record's arrays for the kernels: the layout of each, and which block a grid step reads.

BlockIndex maps take the coordinates (batch row, query head, query tile, key tile).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.tiled_attention import TiledAttention, make_dropout_keys
from ejkernel.families.tiled_attention.block_maps import PatternTiles, pattern_tiles
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window
from ejkernel.families.tiled_attention.mask_terms import mask_function_as_arguments
from ejkernel.families.tiled_attention.record import indices_in_call
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments
from ejkernel.ops.device import current_device
from ejkernel_pallas.tpu.generations import has_256_wide_mxu
from ejkernel_pallas.tpu.mosaic.launch import BlockIndex, Operand
from ejkernel_pallas.tpu.mosaic.split_functions import Row, row_values
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import row_name
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec, pad_head_dim


def canonical_record(record: TiledAttention) -> TiledAttention:
    """Returns the record with pure padding masks as segment ids, by which tiles can be skipped, a `mask_mod` that is a
    window as one, and 0 in all padding.

    Weights of padding are 0, and what they are multiplied with must not be NaN.
    """
    record = mask_function_as_window(padding_as_segments(record))
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return record
    is_key = (record.kv_segment_ids >= 0)[:, :, None, None]
    return dataclasses.replace(
        record,
        query=jnp.where((record.q_segment_ids >= 0)[:, :, None, None], record.query, 0),
        key=jnp.where(is_key, record.key, 0),
        value=jnp.where(is_key, record.value, 0),
    )


def with_segments_of_function(record: TiledAttention) -> TiledAttention:
    """Returns a canonical record with a `mask_mod` of documents as segment ids, for the forward kernel.

    With them it spills fewer registers on chips with wide matrix units. Others gain nothing, and backward kernels take
    more time. A function that does not read the batch row keeps the one list of tile pairs that all batch rows share.
    """
    function = record.mask_mod
    if function is None or not has_256_wide_mxu(current_device().kind):
        return record
    shares_pairs = record.query.shape[0] > 1 and "b" not in function.program.inputs_read
    return record if shares_pairs else mask_function_as_arguments(record)


def operands(record: TiledAttention, spec: TiledSpec) -> dict[str, Operand]:
    """Returns the arrays of a canonical record, by the field names of `TileRefs`."""
    inputs = {
        "query": rows_operand(record.query, spec.block_q),
        "key": kv_rows_operand(record.key, spec),
        "value": kv_rows_operand(record.value, spec),
    }
    queries = {"q_ids": record.q_segment_ids, "q_positions": record.q_positions}
    keys = {"k_ids": record.kv_segment_ids, "k_positions": record.kv_positions}
    if record.dropout_prob > 0.0 and record.dropout_seed is not None:
        dropout_row_keys, keys["dropout_column_keys"] = _dropout_hash_keys(record)
        inputs["dropout_row_keys"] = per_query_operand(dropout_row_keys, spec)
    inputs |= {name: _per_token_operand(x, spec.block_q, False) for name, x in queries.items() if x is not None}
    inputs |= {name: _per_token_operand(x, spec.block_kv, True) for name, x in keys.items() if x is not None}
    if record.bias is not None:
        inputs |= _bias_or_mask_operand("bias", record.bias, spec)
    if record.mask is not None:
        inputs |= _bias_or_mask_operand("mask", record.mask.astype(jnp.int8), spec)
    pattern = pattern_tiles(record, spec.block_q, spec.block_kv)
    if pattern is not None:
        inputs["pattern"] = _pattern_operand(pattern, spec)
    return inputs | _function_operands(record, spec)


def _function_operands(record: TiledAttention, spec: TiledSpec) -> dict[str, Operand]:
    """Returns the rows of `score_mod` and `mask_mod`, and the indices that they read if the record is a shard."""
    inputs: dict[str, Operand] = {}
    for field, function, split in (
        ("score_rows", record.score_mod, spec.score_mod),
        ("mask_rows", record.mask_mod, spec.mask_mod),
    ):
        if function is not None and split is not None:
            values = row_values(function, split.rows, indices_in_call(record))
            for n, (row, x) in enumerate(zip(split.rows, values, strict=True)):
                inputs[row_name(field, n)] = _function_row_operand(row, x, spec)
    if record.dropout_origin is not None and (record.score_mod is not None or record.mask_mod is not None):
        _, _, queries, keys = indices_in_call(record)
        inputs["q_indices"] = _per_token_operand(queries.reshape(1, -1), spec.block_q, False)
        inputs["k_indices"] = _per_token_operand(keys.reshape(1, -1), spec.block_kv, True)
    return inputs


def _function_row_operand(row: Row, x: jax.Array, spec: TiledSpec) -> Operand:
    """Returns a row of a function by tiles of queries or keys, in lanes; one value per head in scalar memory."""
    x = x.astype(jnp.int32 if x.dtype == jnp.bool_ else row.dtype)
    batch, heads = (n > 1 for n in x.shape[:2])

    def index(b: Any, h: Any, *tile: Any) -> BlockIndex:
        return (b if batch else 0, h if heads else 0, *tile)

    if "q_idx" in row.reads:
        return Operand(x.swapaxes(2, 3), (None, None, 1, spec.block_q), lambda b, h, i, j: index(b, h, 0, i))
    if "k_idx" in row.reads:
        return Operand(x, (None, None, 1, spec.block_kv), lambda b, h, i, j: index(b, h, 0, j))
    return Operand(x, (None, None, 1, 1), lambda b, h, i, j: index(b, h, 0, 0), memory_space=pltpu.SMEM)


def _pattern_operand(pattern: PatternTiles, spec: TiledSpec) -> Operand:
    heads, q_tiles, k_tiles = pattern.mask_ids.shape

    def tile_mask_index(b: Any, h: Any, i: Any, j: Any, mask_ids: Any) -> BlockIndex:
        return (mask_ids[((h if heads > 1 else 0) * q_tiles + i) * k_tiles + j], 0, 0)

    block = (None, spec.block_q, spec.block_kv)
    return Operand(jnp.asarray(pattern.tile_masks), block, tile_mask_index, pattern.mask_ids.reshape(-1))


def rows_operand(x: Any, block: int) -> Operand:
    """Returns [B, T, H, D] by tiles of queries: unchanged where a head fills lanes, else with heads before tokens."""
    batch, length, heads, size = x.shape
    if size % LANES == 0:
        return Operand(
            _reshape_shape_or_array(x, (batch, length, heads * size)), (None, block, size), lambda b, h, i, j: (b, i, h)
        )
    array = _move_heads_first(x)
    return Operand(array, (None, None, block, pad_head_dim(size)), lambda b, h, i, j: (b, h, i, 0))


def kv_rows_operand(x: Any, spec: TiledSpec) -> Operand:
    """Returns [B, S, Hk, D] by tiles of keys."""
    operand, group = rows_operand(x, spec.block_kv), np.int32(spec.group_size)
    return dataclasses.replace(operand, index_map=lambda b, h, i, j: operand.index_map(b, lax.div(h, group), j, i))


def undo_rows_layout(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Restores the shape of an array that `rows` has rearranged."""
    if shape[3] % LANES == 0:
        return x.reshape(shape)
    return x[..., : shape[3]].swapaxes(1, 2)


def per_query_operand(x: Any, spec: TiledSpec) -> Operand:
    """Returns [B, H, T] by tiles of queries, in lanes."""
    batch, heads, length = x.shape
    array = _reshape_shape_or_array(x, (batch, heads, 1, length))
    return Operand(array, (None, None, 1, spec.block_q), lambda b, h, i, j: (b, h, 0, i))


def per_head_operand(x: jax.Array) -> Operand:
    """Returns [H] by heads, the same in every lane."""
    array = jnp.broadcast_to(x[:, None, None], (x.shape[0], 1, LANES))
    return Operand(array, (None, 1, LANES), lambda b, h, i, j: (h, 0, 0))


def _per_token_operand(x: jax.Array, block: int, keys: bool) -> Operand:
    alone = x.shape[0] == 1
    return Operand(x[:, None], (None, 1, block), lambda b, h, i, j: (0 if alone else b, 0, j if keys else i))


def _bias_or_mask_operand(name: str, x: jax.Array, spec: TiledSpec) -> dict[str, Operand]:
    """Returns [B|1, H|1, T|1, S|1] by tiles; in lanes and under another name if it has only queries or only keys."""
    batch, heads, queries, keys = (n > 1 for n in x.shape)

    def index(b: Any, h: Any, *tile: Any) -> BlockIndex:
        return (b if batch else 0, h if heads else 0, *tile)

    if queries and keys:
        block = (None, None, spec.block_q, spec.block_kv)
        return {name: Operand(x, block, lambda b, h, i, j: index(b, h, i, j))}
    if queries:
        block = (None, None, 1, spec.block_q)
        return {name + "_per_query": Operand(x.swapaxes(2, 3), block, lambda b, h, i, j: index(b, h, 0, i))}
    x = jnp.broadcast_to(x, (*x.shape[:3], spec.num_keys))
    return {name + "_per_key": Operand(x, (None, None, 1, spec.block_kv), lambda b, h, i, j: index(b, h, 0, j))}


def _reshape_shape_or_array(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)


def _move_heads_first(x: Any) -> Any:
    batch, length, heads, size = x.shape
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((batch, heads, length, pad_head_dim(size)), x.dtype)
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, 0), (0, pad_head_dim(size) - size)))


def _dropout_hash_keys(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Returns dropout's hash keys of rows [B, H, T] and of columns [1, S], as int32 with the same bits.

    Only the columns' top bits are flipped. Row keys are odd, so this flips the top bit of every product, and no other.
    """
    dropout_row_keys, dropout_column_keys = make_dropout_keys(record)
    return dropout_row_keys.astype(jnp.int32), (dropout_column_keys ^ jnp.uint32(2**31)).astype(jnp.int32)
