"""Backward pass of tiled softmax attention in Triton, without atomics.

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    ds_ij   = p_ij (dropout_ij <do_i, v_j> - delta_i)
    dbias   = ds through score_mod and the soft cap
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

An output that is not normalised has p = exp(s - row_max) instead, ds_ij = p_ij dp_ij - [j = argmax_i] delta_i and no
gradient of the sink; a separate pass differentiates its lse. XLA computes delta and the sink's gradient, which are sums
over rows.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import (
    TiledAttention,
    sinks_gradient,
    subtract_lse_cotangent,
    unnormalised_gradients,
)
from ejkernel.families.tiled_attention.mask_bounds import values_of_nodes
from ejkernel.families.tiled_attention.record import indices_in_call
from ejkernel.families.tiled_attention.score_terms import functions_as_arguments
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments, tiles
from ejkernel.planning.scalar_programs import loaded_arrays, scalar_program
from ejkernel.types.pair_functions import PairFunction
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.tiled_attention.config import Tile, TritonBackward, backward_tiles
from ejkernel_triton.tiled_attention.plan import kernel_operands, plan_bias_blocks, plan_key_blocks, plan_query_blocks
from ejkernel_triton.tiled_attention.spec import (
    LOWEST_LOG2_SCORE,
    make_spec,
    query_tile_constants,
    slices_rows,
    specs_of_loads,
    splits_key_value_gradients,
)

Gradients = dict[str, Any]


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
        return unnormalised_gradients(backward, pullback, params)
    (key_tile, query_tile), record, requested = (
        backward_tiles(params),
        padding_as_segments(functions_as_arguments(pullback.record)),
        pullback.grad_fields,
    )
    delta = _output_cotangent_products(pullback, record)
    per_query_inputs = _per_query_inputs(pullback, record, delta)
    gradients: Gradients = {}
    if requested & {"key", "value"}:
        gradients |= _key_value_gradients(record, per_query_inputs, key_tile, requested & {"key", "value"})
    if "query" in requested:
        gradients["query"] = _query_gradient(record, per_query_inputs, query_tile)
    if "bias" in requested:
        gradients["bias"] = _bias_gradient(record, per_query_inputs, query_tile)
    if "score_mod" in requested:
        gradients["score_mod"] = _gradients_of_captured_arrays(record, per_query_inputs, query_tile)
    if "softmax_aux" in requested:
        gradients["softmax_aux"] = sinks_gradient(pullback, delta)
    return {name: gradients[name] for name in sorted(requested)}


def _output_cotangent_products(pullback: Pullback, record: TiledAttention) -> jax.Array:
    """Returns <do, o> of every row, [B, H, T]."""
    cotangent = pullback.cotangent.astype(record.query.dtype)
    products = jnp.sum(cotangent.astype(jnp.float32) * pullback.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    return _zero_padding_rows(products, record)


def _zero_padding_rows(x: jax.Array, record: TiledAttention) -> jax.Array:
    """Returns [B, H, T] with zeros for padding, whose cotangents may be anything."""
    return x if record.q_segment_ids is None else jnp.where(record.q_segment_ids[:, None] >= 0, x, 0)


def _per_query_inputs(pullback: Pullback, record: TiledAttention, delta: jax.Array) -> tuple[Any, ...]:
    """Returns the kernels' other inputs per query: cotangent, shift of its scores in log2, delta, argmax.

    All but the cotangent are [B, H, T].
    """
    residuals, cotangent = pullback.residuals, pullback.cotangent.astype(record.query.dtype)
    if pullback.lse_cotangent is not None:
        delta = _zero_padding_rows(subtract_lse_cotangent(delta, pullback), record)
    # Rows that attend to nothing have shift -inf. With 0 their weights are finite, and masks make them 0.
    shift = residuals.lse if record.normalize_output else residuals.row_max
    # Rows whose keys are all masked by a bias have the lowest finite score.
    shift = jnp.maximum(jnp.where(shift == -jnp.inf, 0, shift) * LOG2E, LOWEST_LOG2_SCORE)
    return cotangent, shift, delta, residuals.row_argmax


def _key_value_gradients(
    record: TiledAttention, per_query_inputs: tuple[Any, ...], tile: Tile, requested_fields: frozenset[str]
) -> Gradients:
    """Returns the requested gradients of key and value, by one kernel if registers suffice for both sums."""
    if len(requested_fields) == 2 and splits_key_value_gradients(record):
        each = [_key_value_gradients(record, per_query_inputs, tile, frozenset({name})) for name in requested_fields]
        return each[0] | each[1]
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dkdv import flash_bwd_dkdv_kernel

    # Without the keys' gradient, a tile can have twice as many queries, unless their positions take the registers.
    has_spare_registers = (
        splits_key_value_gradients(record) and "key" not in requested_fields and record.q_positions is None
    )
    slice_rows = slices_rows(record, tile.stationary_rows, tile.streamed_rows)
    block_q = tile.streamed_rows * (2 if has_spare_registers and not slice_rows else 1)
    blocks = plan_query_blocks(record, block_q, tile.stationary_rows)
    num_tiles = tiles(record.key.shape[1], tile.stationary_rows)
    fields = {"key": record.key, "value": record.value}
    # Outputs that are not requested are not written, and have one element.
    outputs = [ShapeDtype(x.shape if name in requested_fields else (1,), x.dtype) for name, x in fields.items()]
    results = launch(
        flash_bwd_dkdv_kernel,
        (*kernel_operands(record, blocks), *per_query_inputs),
        outputs,
        batch=record.key.shape[0],
        grid=num_tiles * record.key.shape[2] * record.key.shape[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            "spec": make_spec(record, block_q, tile.stationary_rows, slice_rows=slice_rows),
            "BLOCK_Q": block_q,
            "BLOCK_KV": tile.stationary_rows,
            "NUM_TILES": num_tiles,
            "LIST_SHAPE": blocks.list_shape,
            "DK": "key" in requested_fields,
            "DV": "value" in requested_fields,
        },
    )
    return {name: x for name, x in zip(fields, results, strict=True) if name in requested_fields}


def _query_gradient(record: TiledAttention, per_query_inputs: tuple[Any, ...], tile: Tile) -> jax.Array:
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dq import flash_bwd_dq_kernel

    # One program per query tile and query head. Every program stores its rows of dq once.
    blocks = plan_key_blocks(record, tile.stationary_rows, tile.streamed_rows)
    num_tiles = tiles(record.query.shape[1], tile.stationary_rows)
    (dquery,) = launch(
        flash_bwd_dq_kernel,
        (*kernel_operands(record, blocks), *per_query_inputs),
        [ShapeDtype(record.query.shape, record.query.dtype)],
        batch=record.query.shape[0],
        grid=num_tiles * record.query.shape[2] * record.query.shape[0],
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            **query_tile_constants(record, tile),
            "NUM_TILES": num_tiles,
            "LIST_SHAPE": blocks.list_shape,
            "REVERSE_TILES": record.causal or record.mask_mod is not None,
        },
    )
    return dquery


def _bias_gradient(record: TiledAttention, per_query_inputs: tuple[Any, ...], tile: Tile) -> jax.Array:
    bias = record.bias
    assert bias is not None  # its gradient is requested
    tile, constants = _bias_tile_constants(record, tile)
    return _sum_of_score_gradients(record, per_query_inputs, tile, constants, ShapeDtype(bias.shape, bias.dtype))


def _bias_tile_constants(record: TiledAttention, tile: Tile) -> tuple[Tile, dict[str, Any]]:
    # Without the gradient of the queries a tile can have twice as many, if rows are multiplied in pieces.
    if splits_key_value_gradients(record) and slices_rows(record, 2 * tile.stationary_rows, tile.streamed_rows):
        tile = tile._replace(stationary_rows=2 * tile.stationary_rows)
    return tile, query_tile_constants(record, tile)


def _sum_of_score_gradients(
    record: TiledAttention, per_query_inputs: tuple[Any, ...], tile: Tile, constants: dict[str, Any], term: ShapeDtype
) -> jax.Array:
    """Returns the gradient of a term of the scores [B|1, H|1, T|1, S|1], summed along the axes of size 1."""
    from ejkernel_triton.tiled_attention.kernels.flash_bwd_dbias import flash_bwd_dbias_kernel

    num_queries, num_keys = record.query.shape[1], record.key.shape[1]
    blocks = plan_bias_blocks(record, tile.stationary_rows, tile.streamed_rows)
    q_tiles, k_tiles = tiles(num_queries, tile.stationary_rows), tiles(num_keys, tile.streamed_rows)
    grid = (*term.shape[:2], q_tiles if term.shape[2] > 1 else 1, k_tiles if term.shape[3] > 1 else 1)
    (gradient,) = launch(
        flash_bwd_dbias_kernel,
        (*kernel_operands(record, blocks), *per_query_inputs),
        [term],
        batch=record.query.shape[0],
        grid=math.prod(grid),
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            **constants,
            "NUM_Q_TILES": q_tiles,
            "NUM_K_TILES": k_tiles,
            "BIAS_SIZES": term.shape[1:],
            "LIST_SHAPE": blocks.list_shape,
        },
    )
    return gradient


def _gradients_of_captured_arrays(
    record: TiledAttention, per_query_inputs: tuple[Any, ...], tile: Tile
) -> PairFunction:
    """Returns the gradients of the arrays that `score_mod` closes over, in its place; those of integers are None.

    The kernel sums the gradients of each element that a pair reads, over keys or over queries, and XLA differentiates
    the elements by the arrays.
    """
    function, (batch, queries, heads, _), keys = record.score_mod, record.query.shape, record.key.shape[1]
    assert function is not None  # its gradient is requested
    program, floating = scalar_program(function), jnp.floating
    tile, constants = _bias_tile_constants(record, tile)
    specs = specs_of_loads(record, constants["spec"])

    def elements(captured: dict[int, jax.Array]) -> list[jax.Array]:
        changed = tuple(captured.get(n, x) for n, x in enumerate(function.captured))
        arrays = loaded_arrays(dataclasses.replace(function, captured=changed))
        live = sorted(set().union(*(program.live_nodes(n) for n in specs)))
        values = values_of_nodes(program, live, indices_in_call(record), arrays)
        return [values[n] for n in specs]

    captured = {n: x.astype(jnp.float32) for n, x in enumerate(function.captured) if jnp.issubdtype(x.dtype, floating)}
    primals, pull = jax.vjp(elements, captured)
    cotangents: list[jax.Array] = []
    for primal, spec in zip(primals, specs.values(), strict=True):
        # With all rows and heads, and queries or keys, there are programs for all of the GPU.
        shape = (batch, heads, 1, keys) if primal.shape[3] > 1 else (batch, heads, queries, 1)
        term = ShapeDtype(shape, jnp.float32)
        found = _sum_of_score_gradients(record, per_query_inputs, tile, {**constants, "spec": spec}, term)
        axes = tuple(n for n in range(4) if primal.shape[n] == 1)
        cotangents.append(jnp.sum(found, axis=axes, keepdims=True).astype(primal.dtype))
    (found,) = pull(cotangents)
    gradients = [found[n].astype(x.dtype) if n in found else None for n, x in enumerate(function.captured)]
    return dataclasses.replace(function, captured=tuple(gradients))
