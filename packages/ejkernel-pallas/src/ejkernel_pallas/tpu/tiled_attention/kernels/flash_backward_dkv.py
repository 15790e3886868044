"""Backward kernel of keys and values, with one accumulator per key tile.

    for every tile pair of a key tile, and every head of the group:
        for every chunk:
            p, ds recomputed (module `recompute`)  ──►  weights[parity], dscores[parity]
            dvalue_acc += p^T cotangent;  dkey_acc += ds^T query
    after the last pair: accumulators, scaled ──► dkey, dvalue

Scores are [keys, queries], so the products read p^T and ds^T as they are, and nothing is transposed.
"""

from typing import Any

from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand
from ejkernel_pallas.tpu.mosaic.vectors import matrix_product
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import (
    DistinctRowsAndHeads,
    ScoreChunk,
    current_entry,
    for_each_chunk,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import kv_rows_operand
from ejkernel_pallas.tpu.tiled_attention.kernels.pair_call import tile_pairs_call
from ejkernel_pallas.tpu.tiled_attention.kernels.recompute import (
    backward_scratch,
    recompute_weights,
    score_gradient,
    zero_accumulators,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.kernels.score_chunk import apply_dropout, load_queries, transpose_dropout_keys
from ejkernel_pallas.tpu.tiled_attention.plan import FIRST_PAIR_FLAG, LAST_PAIR_FLAG
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


def key_gradients_call(
    name: str, table: Any, inputs: dict[str, Operand], gradient_shapes: dict[str, Any], spec: TiledSpec
) -> KernelCall:
    """Returns the call of the kernel that computes the gradients of keys and values.

    Args:
        name: The kernel's name.
        table: Tile pairs by key tile, int32 [B|1, Hk|1, steps].
        inputs: The operands that it reads.
        gradient_shapes: Shape and dtype of each requested gradient, `"dkey"` and `"dvalue"`.
        spec: The kernel's constants.
    """
    outputs = {field: kv_rows_operand(x, spec) for field, x in gradient_shapes.items()}
    scratch = backward_scratch(spec, tuple(gradient_shapes), inputs["query"].array.dtype)
    return tile_pairs_call(name, key_gradients_kernel, BackwardRefs, table, spec, inputs, outputs, scratch)


def key_gradients_kernel(refs: BackwardRefs, *, spec: TiledSpec, distinct_rows_and_heads: DistinctRowsAndHeads) -> None:
    """Adds one tile pair of a key tile to the gradients of keys and values.

    Args:
        refs: Blocks and scratch memory, with `dkey` and `dvalue` if they are requested; the table lists tile pairs by
            key tile, int32 [(B|1) * (Hk|1) * steps], each for every head of the group.
        spec: The kernel's constants.
        distinct_rows_and_heads: Whether batch rows, and heads, have tile pairs of their own.
    """
    entry, member = current_entry(refs.table, distinct_rows_and_heads), pl.program_id(3)
    # The heads of a group are the innermost grid axis: all of them add to a key tile's accumulators before the next key
    # tile.
    first = ((entry & FIRST_PAIR_FLAG) != 0) & (member == 0)
    zero_accumulators(refs, first)

    @pl.when(first)
    def _() -> None:
        transpose_dropout_keys(refs, spec)

    for_each_chunk(entry, spec, lambda at: _add_to_key_gradients(refs, at))

    @pl.when(((entry & LAST_PAIR_FLAG) != 0) & (member == spec.group_size - 1))
    def _() -> None:
        if refs.dkey is not None:
            # The scale is applied once at the end, in float32, instead of to every score's gradient.
            refs.dkey[...] = (refs.dkey_acc[...] * spec.score_scale).astype(refs.dkey.dtype)
        if refs.dvalue is not None:
            refs.dvalue[...] = (refs.dvalue_acc[...] * spec.dropout_scale).astype(refs.dvalue.dtype)


def _add_to_key_gradients(refs: BackwardRefs, at: ScoreChunk) -> None:
    query, cotangent = load_queries(refs.query, at), load_queries(refs.cotangent, at)
    slope, mask = recompute_weights(refs, query, at)
    if refs.dvalue is not None:
        # dv needs dropped weights as 0, the gradient of scores needs the weights before dropout, so both are read from
        # scratch.
        dropped = apply_dropout(at.of(refs.weights)[...], refs, at).astype(cotangent.dtype)
        refs.dvalue_acc[at.key_slice, :] += matrix_product(dropped, cotangent, (1, 0), at.spec.precision)
    if refs.dkey is not None:
        at.of(refs.dscores)[...] = score_gradient(refs, cotangent, slope, mask, at).astype(query.dtype)
        refs.dkey_acc[at.key_slice, :] += matrix_product(at.of(refs.dscores)[...], query, (1, 0), at.spec.precision)
