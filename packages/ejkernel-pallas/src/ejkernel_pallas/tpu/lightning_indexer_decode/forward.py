"""Forward pass of the decode step of the lightning indexer on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.lightning_indexer import (
    LightningIndexer,
    TopKeyIndicesAndScores,
    nothing_selected,
    num_keys,
    with_wide_query,
)
from ejkernel_pallas.tpu.lightning_indexer_decode import plan
from ejkernel_pallas.tpu.lightning_indexer_decode.config import TpuIndexerDecodeTiles
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.score_and_select import score_and_select
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def forward(record: LightningIndexer, config: TpuIndexerDecodeTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] float32. There are no residuals.
    """
    record = with_wide_query(record)
    (batch, tokens, *_), top_k = record.query.shape, record.top_k
    if not record.query.size or not record.key.size or not num_keys(record):
        return nothing_selected(record), ()
    spec = make_spec(record, config)
    starts, ends = plan.key_bounds(record)
    row_bounds = plan.row_bounds(starts, ends)
    steps = plan.grid_steps(*row_bounds, spec)
    tables = {name: getattr(steps, name) for name in ("step_rows", "step_tiles", "first_tiles", "end_tiles")}
    tables |= {"num_steps": steps.num_steps[None], "key_starts": starts.reshape(-1), "key_ends": ends.reshape(-1)}
    if spec.slots_per_page:
        tables |= plan.page_tables(record, *row_bounds, spec)
    inputs, scratch = _inputs(record, spec), _scratch(record, spec)
    shape = (batch, tokens, spec.list_rows, LANES)
    outputs = {
        name: Operand(jax.ShapeDtypeStruct(shape, dtype), (None, *shape[1:]), lambda s, rows, *_: (rows[s], 0, 0, 0))
        for name, dtype in (("indices", jnp.int32), ("scores", jnp.float32))
    }
    blocks = tuple(x for x in (*inputs.values(), *outputs.values()) if x.block is not None)
    memory = {name: x for name, x in scratch.items() if x.memory_space == pltpu.VMEM}
    results = launch(
        KernelCall(
            name="ejkernel_lightning_indexer_decode",
            kernel=functools.partial(score_and_select, spec=spec),
            refs=IndexerDecodeRefs,
            grid=(steps.num_steps,),
            scalar_tables=tables,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            vmem_limit=vmem_limit_bytes(blocks, memory),
            compiler_params={"disable_bounds_checks": True},
        )
    )
    indices, scores = (results[name].reshape(batch, tokens, -1)[..., :top_k] for name in ("indices", "scores"))
    return (indices, scores), ()


def _inputs(record: LightningIndexer, spec: IndexerDecodeSpec) -> dict[str, Operand]:
    """Returns the kernel's inputs: queries of a row, and a tile of keys or all pages."""

    def of_row(array: jax.Array) -> Operand:
        return Operand(array, (None, *array.shape[1:]), lambda s, rows, *_: (rows[s], 0, 0))

    key = record.key
    inputs = {
        "query": of_row(plan.rows_of_heads(record, spec)),
        "weights": of_row(plan.weights_of_heads(record, spec)),
    }
    if spec.slots_per_page:
        inputs["key"] = Operand(key)
    else:
        block = (None, spec.block_k, key.shape[2])
        inputs["key"] = Operand(key, block, lambda s, rows, tiles, *_: (rows[s], tiles[s], 0))
    if record.key_scales is not None:
        block = (None, 1, spec.block_k)
        scales = plan.scales_of_keys(record)
        inputs["key_scales"] = Operand(scales, block, lambda s, rows, tiles, *_: (rows[s], 0, tiles[s]))
    return inputs


def _scratch(record: LightningIndexer, spec: IndexerDecodeSpec) -> dict[str, Any]:
    """Returns the kernel's scratch memory."""
    scratch: dict[str, Any] = {
        "ordered_scores": pltpu.VMEM((spec.num_queries, spec.num_rows, LANES), jnp.int32),
        "thresholds": pltpu.VMEM((spec.num_queries, LANES), jnp.int32),
        "num_ties": pltpu.VMEM((spec.num_queries, LANES), jnp.float32),
        "positions": pltpu.VMEM((spec.num_rows, LANES), jnp.int32),
        "placed": pltpu.VMEM((spec.num_pieces * spec.list_rows, LANES), jnp.float32),
        "list_scores": pltpu.VMEM((spec.list_rows, LANES), jnp.int32),
        "list_indices": pltpu.VMEM((spec.list_rows, LANES), jnp.int32),
        "list_positions": pltpu.VMEM((spec.list_rows, LANES), jnp.int32),
        "score_columns": pltpu.VMEM((spec.list_rows * LANES, LANES), jnp.int32),
    }
    if spec.slots_per_page:
        scratch["key_buffer"] = pltpu.VMEM((2, spec.block_k, record.key.shape[2]), record.key.dtype)
        scratch["pages_arrived"] = pltpu.SemaphoreType.DMA((2,))
    return scratch
