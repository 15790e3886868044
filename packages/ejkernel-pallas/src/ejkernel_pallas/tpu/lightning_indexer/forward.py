"""Forward pass of the lightning indexer on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.lightning_indexer import (
    LightningIndexer,
    TopKeyIndicesAndScores,
    nothing_selected,
    with_wide_query,
)
from ejkernel_pallas.tpu.lightning_indexer import plan
from ejkernel_pallas.tpu.lightning_indexer.config import BLOCK_Q, TpuIndexerTiles
from ejkernel_pallas.tpu.lightning_indexer.kernels.refs import IndexerRefs
from ejkernel_pallas.tpu.lightning_indexer.kernels.score_and_select import score_and_select
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def forward(record: LightningIndexer, config: TpuIndexerTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] float32. There are no residuals.
    """
    record = with_wide_query(record)
    (batch, tokens, *_), top_k = record.query.shape, record.top_k
    if not record.query.size or not record.key.size:
        return nothing_selected(record), ()
    spec = make_spec(record, config)
    bounds = plan.key_bounds(record, spec)
    first, end = plan.key_tile_bounds(bounds, spec)
    inputs = _inputs(record, bounds, spec)
    shape, block = (batch, spec.num_query_blocks * BLOCK_Q, spec.kept_rows), (None, BLOCK_Q, spec.kept_rows)
    outputs = {
        name: Operand(jax.ShapeDtypeStruct(shape, dtype), block, lambda *step: (step[0], step[1], 0))
        for name, dtype in (("indices", jnp.int32), ("scores", jnp.float32))
    }
    rows = pltpu.VMEM((spec.buffer_rows + LANES, BLOCK_Q), jnp.int32)
    memory = {"ordered_scores": rows, "packed_indices": rows}
    results = launch(
        KernelCall(
            name="ejkernel_lightning_indexer",
            kernel=functools.partial(score_and_select, spec=spec),
            refs=IndexerRefs,
            grid=(batch, spec.num_query_blocks, spec.num_key_tiles),
            num_parallel_axes=2,
            scalar_tables={"first_key_tile": first, "end_key_tile": end},
            inputs=inputs,
            outputs=outputs,
            scratch={**memory, "num_scored_tiles": pltpu.SMEM((1,), jnp.int32)},
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), memory),
        )
    )
    return (results["indices"][:, :tokens, :top_k], results["scores"][:, :tokens, :top_k]), ()


def _inputs(record: LightningIndexer, bounds: tuple[jax.Array, jax.Array], spec: IndexerSpec) -> dict[str, Operand]:
    """Returns the kernel's inputs: blocks of queries, and the tiles of keys that they need."""

    def query_block(array: jax.Array) -> Operand:
        return Operand(array, (None, None, *array.shape[2:]), lambda *step: (step[0], step[1], 0, 0))

    def key_tile(b: Any, i: Any, j: Any, first: Any, end: Any) -> Any:
        # Where a tile is not needed, the index is that of a neighbour, so that nothing is copied.
        block = b * spec.num_query_blocks + i
        return jnp.clip(j, first[block], jnp.maximum(end[block] - 1, first[block]))

    # 8 bits are converted once, to a dtype that holds them exactly.
    key = record.key.astype(record.query.dtype)
    inputs = {
        "query": query_block(plan.rows_of_heads(record, spec)),
        "weights": query_block(plan.weights_of_heads(record, spec)),
        "key_starts": query_block(bounds[0]),
        "key_ends": query_block(bounds[1]),
        "key": Operand(key, (None, spec.block_k, key.shape[2]), lambda *step: (step[0], key_tile(*step), 0)),
    }
    if record.key_scales is not None:
        scales = record.key_scales.astype(jnp.float32)[:, None]
        inputs["key_scales"] = Operand(scales, (None, 1, spec.block_k), lambda *step: (step[0], 0, key_tile(*step)))
    return inputs
