"""Backward kernel of the bias, and of the rows of `score_mod`: the gradient of the scores, summed over the axes along
which the bias or the row is broadcast.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES, lane_groups
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import ScoreChunk, for_each_chunk
from ejkernel_pallas.tpu.tiled_attention.kernels.recompute import (
    backward_scratch,
    recompute_weights,
    score_gradient,
    transpose_statistics,
    zero_accumulators,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import BackwardRefs, gather_rows
from ejkernel_pallas.tpu.tiled_attention.kernels.score_chunk import load_queries, transpose_dropout_keys
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


def bias_gradient(record: TiledAttention, flags: Any, inputs: dict[str, Operand], spec: TiledSpec) -> jax.Array:
    """Returns the bias's gradient; arguments as in `sum_of_score_gradients`."""
    bias = record.bias
    assert bias is not None  # its gradient was requested
    return sum_of_score_gradients(record, bias.shape, flags, inputs, spec).astype(bias.dtype)


def sum_of_score_gradients(
    record: TiledAttention, shape: tuple[int, ...], flags: Any, inputs: dict[str, Operand], spec: TiledSpec
) -> jax.Array:
    """Returns the gradient of a term of the scores, float32 of its shape; axes along which the term is broadcast are
    summed per tile, so nothing larger is stored.

    Args:
        record: The record, for its sizes.
        shape: Shape of the term, [B|1, H|1, T|1, S|1].
        flags: Flags of every tile pair, int32 [B|1, H|1, query tiles, key tiles].
        inputs: The operands that the kernel reads.
        spec: The kernel's constants.
    """
    q_tiles, k_tiles = flags.shape[2:]
    counts = (record.query.shape[0], record.query.shape[2], q_tiles, k_tiles)
    # The outer grid axes are the term's own axes, the inner ones those along which it is broadcast: one sum per tile.
    outer = tuple(n if size > 1 else 1 for n, size in zip(counts, shape, strict=True))
    inner = tuple(n // k for n, k in zip(counts, outer, strict=True))
    result, acc = _operand_and_acc_shape(shape, spec)
    gradient = launch(
        KernelCall(
            name="ejkernel_attention_backward_bias",
            kernel=functools.partial(
                bias_gradient_kernel, spec=spec, table_shape=flags.shape, is_per_query=shape[2] > 1 and shape[3] == 1
            ),
            refs=gather_rows(BackwardRefs),
            grid=(*outer, *inner),
            num_parallel_axes=2,
            scalar_tables={"table": flags.reshape(-1)},
            inputs=inputs,
            outputs={"dbias": result},
            scratch={"dbias_acc": pltpu.VMEM(acc, jnp.float32), **backward_scratch(spec, (), record.query.dtype)},
            coordinate_map=lambda *step: (step[0] + step[4], step[1] + step[5], step[2] + step[6], step[3] + step[7]),
        )
    )["dbias"]
    if shape[3] == 1:  # stored as a row: of queries or, for a single element, of keys
        gradient = gradient.sum(axis=3, keepdims=True) if shape[2] == 1 else gradient.swapaxes(2, 3)
    return gradient


def _operand_and_acc_shape(shape: tuple[int, ...], spec: TiledSpec) -> tuple[Operand, tuple[int, int]]:
    """Returns the gradient's array, and the shape of the sum that becomes one of its tiles."""
    batch, heads, queries, keys = shape
    if queries > 1 and keys > 1:
        block = (spec.block_q, spec.block_kv)
        return _term_operand(jax.ShapeDtypeStruct(shape, jnp.float32), block, lambda i, j: (i, j)), block
    if queries > 1:
        array = jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32)
        return _term_operand(array, (1, spec.block_q), lambda i, j: (0, i)), (spec.block_q, LANES)
    array = jax.ShapeDtypeStruct((batch, heads, 1, keys if keys > 1 else spec.block_kv), jnp.float32)
    return _term_operand(array, (1, spec.block_kv), lambda i, j: (0, j if keys > 1 else 0)), (1, spec.block_kv)


def _term_operand(array: Any, block: tuple[int, int], tile_index_map: Any) -> Operand:
    batch, heads = array.shape[0] > 1, array.shape[1] > 1
    return Operand(
        array, (None, None, *block), lambda b, h, i, j: (b if batch else 0, h if heads else 0, *tile_index_map(i, j))
    )


def bias_gradient_kernel(
    refs: BackwardRefs, *, spec: TiledSpec, table_shape: tuple[int, ...], is_per_query: bool
) -> None:
    """Adds one tile pair to the sum that becomes a tile of the gradient of a bias or of another term of the scores.

    Args:
        refs: Blocks and scratch memory; the table has the flags of every tile pair, int32
            [(B|1) * (H|1) * query tiles * key tiles].
        spec: The kernel's constants.
        table_shape: Batch rows and heads that the table distinguishes, and tiles of queries and of keys.
        is_per_query: Whether the term has an axis of queries and none of keys.
    """
    # Every axis appears twice in the grid, and one of the two indices is always 0: an axis of the bias is an outer one,
    # and an axis along which it is broadcast is an inner one, whose steps are summed.
    b, h, i, j = (pl.program_id(axis) + pl.program_id(axis + 4) for axis in range(4))
    row = (b if table_shape[0] > 1 else 0) * table_shape[1] + (h if table_shape[1] > 1 else 0)
    kind = refs.table[(row * table_shape[2] + i) * table_shape[3] + j]
    inner_steps = [pl.program_id(axis) for axis in range(4, 8)]
    # The first and the last term of a sum: the steps where all inner axes are at their start, and at their end.
    start, end = jnp.bool_(True), jnp.bool_(True)
    for axis, inner_step in enumerate(inner_steps, 4):
        start, end = start & (inner_step == 0), end & (inner_step == pl.num_programs(axis) - 1)
    zero_accumulators(refs, start)
    transpose_statistics(refs)
    transpose_dropout_keys(refs, spec)
    for_each_chunk((i << 18) | (j << 4) | kind, spec, lambda at: _add_to_bias_gradient(refs, at, is_per_query))

    @pl.when(end)
    def _() -> None:
        total = refs.dbias_acc[...]
        if is_per_query:
            # Partial sums are kept per lane until here, so the slow reduction across lanes runs once per tile.
            total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), total.shape).T[:1]
        refs.dbias[...] = total


def _add_to_bias_gradient(refs: BackwardRefs, at: ScoreChunk, is_per_query: bool) -> None:
    cotangent = load_queries(refs.cotangent, at)
    slope, mask = recompute_weights(refs, load_queries(refs.query, at), at)
    dscores = score_gradient(refs, cotangent, slope, mask, at)
    # A bias of rows or columns alone is summed here, and does not need a tile of pairs in VMEM.
    if refs.dbias_acc.shape == (at.spec.block_q, at.spec.block_kv):
        refs.dbias_acc[at.query_slice, at.key_slice] += dscores
    elif not is_per_query:
        refs.dbias_acc[:, at.key_slice] += jnp.sum(dscores, axis=0, keepdims=True)
    else:
        # Summed across lane groups on the VPU here, and across lanes once at the end.
        by_lane = lane_groups(dscores)
        refs.dbias_acc[at.query_slice, :] += functools.reduce(jnp.add, by_lane)
