"""Backward kernel of queries, with one accumulator per query tile.

for every tile pair of a query tile:
    for every chunk:
        ds recomputed (module `recompute`)  ──►  dscores[parity]
        dquery_acc += ds key
after the last pair: accumulator, scaled ──► dquery
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
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import rows_operand
from ejkernel_pallas.tpu.tiled_attention.kernels.pair_call import tile_pairs_call
from ejkernel_pallas.tpu.tiled_attention.kernels.recompute import (
    backward_scratch,
    recompute_weights,
    score_gradient,
    transpose_statistics,
    zero_accumulators,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.kernels.score_chunk import load_keys, transpose_dropout_keys
from ejkernel_pallas.tpu.tiled_attention.plan import FIRST_PAIR_FLAG, LAST_PAIR_FLAG
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


def query_gradient_call(name: str, table: Any, inputs: dict[str, Operand], dquery: Any, spec: TiledSpec) -> KernelCall:
    """Returns the call of the kernel of the queries' gradient; `dquery` is its shape and dtype, the rest as in
    `key_gradients_call`.
    """
    outputs, scratch = (
        {"dquery": rows_operand(dquery, spec.block_q)},
        backward_scratch(spec, ("dquery",), inputs["query"].array.dtype),
    )
    return tile_pairs_call(name, query_gradient_kernel, BackwardRefs, table, spec, inputs, outputs, scratch)


def query_gradient_kernel(
    refs: BackwardRefs, *, spec: TiledSpec, distinct_rows_and_heads: DistinctRowsAndHeads
) -> None:
    """Adds one tile pair of a query tile to the gradient of the queries.

    Args:
        refs: Blocks and scratch memory; the table lists tile pairs by query tile, int32 [(B|1) * (H|1) * steps].
        spec: The kernel's constants.
        distinct_rows_and_heads: Whether batch rows, and heads, have tile pairs of their own.
    """
    entry = current_entry(refs.table, distinct_rows_and_heads)
    zero_accumulators(refs, (entry & FIRST_PAIR_FLAG) != 0)

    @pl.when((entry & FIRST_PAIR_FLAG) != 0)
    def _() -> None:
        # Once per query tile, since all of its chunks read the columns.
        transpose_statistics(refs)
        transpose_dropout_keys(refs, spec)

    for_each_chunk(entry, spec, lambda at: _add_to_query_gradient(refs, at))

    @pl.when((entry & LAST_PAIR_FLAG) != 0)
    def _() -> None:
        refs.dquery[...] = (refs.dquery_acc[...] * spec.score_scale).astype(refs.dquery.dtype)


def _add_to_query_gradient(refs: BackwardRefs, at: ScoreChunk) -> None:
    slope, mask = recompute_weights(refs, refs.query[at.query_slice, :], at)
    key = load_keys(refs.key, at)
    at.of(refs.dscores)[...] = score_gradient(refs, refs.cotangent[at.query_slice, :], slope, mask, at).astype(
        key.dtype
    )
    refs.dquery_acc[at.query_slice, :] += matrix_product(at.of(refs.dscores)[...], key, (1, 0), at.spec.precision)
