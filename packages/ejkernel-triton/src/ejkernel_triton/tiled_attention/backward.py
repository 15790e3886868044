"""Backward pass of tiled softmax attention in Triton, without atomics.

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i)
    dbias   = ds through the soft cap
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

An output that is not normalised has p = exp(s - row_max) instead, ds_ij = p_ij dp_ij - [j = argmax_i] delta_i and no
gradient of the sink; a separate pass differentiates its lse. XLA computes delta and the sink's gradient, which are sums
over rows.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention, added_up, less_lse_cotangent, sinks_gradient
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments, tiles
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.tiled_attention.config import Tile, TritonBackward, backward_tiles
from ejkernel_triton.tiled_attention.plan import bias_blocks, key_blocks, operands, query_blocks
from ejkernel_triton.tiled_attention.spec import LOWEST, in_pieces, make_spec, splits

Gradients = dict[str, jax.Array]


def backward(pullback: Pullback, params: TritonBackward) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the names of the requested fields.
        params: Tile sizes, warps and stages of the kernels that accumulate for keys, for queries and for a bias.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    if pullback.lse_cotangent is not None and not pullback.record.normalize_output:
        return added_up(backward, pullback, params)
    (keys, queries), record, wanted = backward_tiles(params), padding_as_segments(pullback.record), pullback.wanted
    delta = _products(pullback, record)
    rows = _rows(pullback, record, delta)
    gradients: Gradients = {}
    if wanted & {"key", "value"}:
        gradients |= _of_keys(record, rows, keys, wanted & {"key", "value"})
    if "query" in wanted:
        gradients["query"] = _of_queries(record, rows, queries)
    if "bias" in wanted:
        gradients["bias"] = _of_bias(record, rows, queries)
    if "softmax_aux" in wanted:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    return {name: gradients[name] for name in sorted(wanted)}


def _products(pullback: Pullback, record: TiledAttention) -> jax.Array:
    """Returns <do, o> of every row, [B, H, T]."""
    cotangent = pullback.cotangent.astype(record.query.dtype)
    products = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    return _without_padding(products, record)


def _without_padding(x: jax.Array, record: TiledAttention) -> jax.Array:
    """Returns [B, H, T] with zeros for padding, whose cotangents may be anything."""
    return x if record.q_segment_ids is None else jnp.where(record.q_segment_ids[:, None] >= 0, x, 0)


def _rows(pullback: Pullback, record: TiledAttention, delta: jax.Array) -> tuple[Any, ...]:
    """Returns the kernels' other inputs per query: cotangent, shift of its scores in log2, delta, argmax.

    All but the cotangent are [B, H, T].
    """
    residuals, cotangent = pullback.residuals, pullback.cotangent.astype(record.query.dtype)
    if pullback.lse_cotangent is not None:
        delta = _without_padding(less_lse_cotangent(delta, pullback), record)
    # Rows that attend to nothing have shift -inf. With 0 their weights are finite, and masks make them 0.
    shift = residuals.lse if record.normalize_output else residuals.row_max
    # Rows whose keys are all masked by a bias have the lowest finite score.
    shift = jnp.maximum(jnp.where(shift == -jnp.inf, 0, shift) * LOG2E, LOWEST)
    return cotangent, shift, delta, residuals.row_argmax


def _of_keys(record: TiledAttention, rows: tuple[Any, ...], tile: Tile, wanted: frozenset[str]) -> Gradients:
    """Returns the requested gradients of key and value, by one kernel if registers suffice for both sums."""
    if len(wanted) == 2 and splits(record):
        return {k: x for name in wanted for k, x in _of_keys(record, rows, tile, frozenset({name})).items()}
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dkdv import flash_bwd_dkdv_kernel

    # Without the keys' gradient, a tile can have twice as many queries, unless their positions take the registers.
    roomy = splits(record) and "key" not in wanted and record.q_positions is None
    pieces = in_pieces(record, tile.stationary, tile.streamed)
    q_block = tile.streamed * (2 if roomy and not pieces else 1)
    blocks = query_blocks(record, q_block, tile.stationary)
    count = tiles(record.key.shape[1], tile.stationary)
    fields = {"key": record.key, "value": record.value}
    # Outputs that are not requested are not written, and have one element.
    outputs = [Shape(x.shape if name in wanted else (1,), x.dtype) for name, x in fields.items()]
    made = launch(
        flash_bwd_dkdv_kernel,
        (*operands(record, blocks), *rows),
        outputs,
        batch=record.key.shape[0],
        grid=count * record.key.shape[2] * record.key.shape[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            "spec": make_spec(record, q_block, tile.stationary, pieces=pieces),
            "Q_BLOCK": q_block,
            "K_BLOCK": tile.stationary,
            "TILES": count,
            "LISTS": blocks.lists,
            "DK": "key" in wanted,
            "DV": "value" in wanted,
        },
    )
    return {name: x for name, x in zip(fields, made, strict=True) if name in wanted}


def _of_queries(record: TiledAttention, rows: tuple[Any, ...], tile: Tile) -> jax.Array:
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dq import flash_bwd_dq_kernel

    # One program per query tile and query head. Every program stores its rows of dq once.
    blocks = key_blocks(record, tile.stationary, tile.streamed)
    count = tiles(record.query.shape[1], tile.stationary)
    (dquery,) = launch(
        flash_bwd_dq_kernel,
        (*operands(record, blocks), *rows),
        [Shape(record.query.shape, record.query.dtype)],
        batch=record.query.shape[0],
        grid=count * record.query.shape[2] * record.query.shape[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            "spec": make_spec(
                record, tile.stationary, tile.streamed, pieces=in_pieces(record, tile.stationary, tile.streamed)
            ),
            "Q_BLOCK": tile.stationary,
            "K_BLOCK": tile.streamed,
            "TILES": count,
            "LISTS": blocks.lists,
            "REVERSED": record.causal,
        },
    )
    return dquery


def _of_bias(record: TiledAttention, rows: tuple[Any, ...], tile: Tile) -> jax.Array:
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dbias import flash_bwd_dbias_kernel

    bias, queries, keys = record.bias, record.query.shape[1], record.key.shape[1]
    assert bias is not None  # its gradient is requested
    # Without the gradient of the queries a tile can have twice as many, if rows are multiplied in pieces.
    if splits(record) and in_pieces(record, 2 * tile.stationary, tile.streamed):
        tile = tile._replace(stationary=2 * tile.stationary)
    blocks = bias_blocks(record, tile.stationary, tile.streamed)
    q_tiles, k_tiles = tiles(queries, tile.stationary), tiles(keys, tile.streamed)
    grid = (*bias.shape[:2], q_tiles if bias.shape[2] > 1 else 1, k_tiles if bias.shape[3] > 1 else 1)
    (dbias,) = launch(
        flash_bwd_dbias_kernel,
        (*operands(record, blocks), *rows),
        [Shape(bias.shape, bias.dtype)],
        batch=record.query.shape[0],
        grid=math.prod(grid),
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            "spec": make_spec(
                record, tile.stationary, tile.streamed, pieces=in_pieces(record, tile.stationary, tile.streamed)
            ),
            "Q_BLOCK": tile.stationary,
            "K_BLOCK": tile.streamed,
            "Q_TILES": q_tiles,
            "K_TILES": k_tiles,
            "SIZES": bias.shape[1:],
            "LISTS": blocks.lists,
        },
    )
    return dbias
