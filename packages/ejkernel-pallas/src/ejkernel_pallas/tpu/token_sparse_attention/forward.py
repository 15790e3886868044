"""Forward pass of token-sparse attention on TPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.token_sparse_attention import plan
from ejkernel_pallas.tpu.token_sparse_attention.config import TpuTokenSparse
from ejkernel_pallas.tpu.token_sparse_attention.kernels.attend_counted import TokenSparseRefs, attend_counted
from ejkernel_pallas.tpu.token_sparse_attention.spec import TokenSparseSpec, make_spec


def forward(record: TokenSparseAttention, config: TpuTokenSparse) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [B, T, H, Dv] in the query's dtype, and lse [B, H, T] float32.
    """
    if not record.query.size or not record.key.size or not record.indices.size or not record.value_size:
        return output_without_keys(record)
    batch, tokens = record.query.shape[:2]
    spec = make_spec(record, config)
    rows = (spec.kv_heads, spec.tile_rows)
    inputs, outputs = _inputs(record, spec), output_operands(record, (batch, spec.num_query_tiles, *rows))
    first, end = plan.key_tile_bounds(record, spec.block_q, spec.block_kv, spec.num_key_tiles)
    terms = (spec.num_lists, spec.block_q, spec.num_key_tiles * spec.block_kv // LANES, LANES)
    scratch = {
        "list_terms": pltpu.VMEM(terms, jnp.float32),
        "row_max": pltpu.VMEM((*rows, LANES), jnp.float32),
        "row_sum": pltpu.VMEM((*rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((*rows, spec.value_width), jnp.float32),
    }
    results = launch(
        KernelCall(
            name="ejkernel_token_sparse_attention",
            kernel=functools.partial(attend_counted, spec=spec),
            refs=TokenSparseRefs,
            grid=(batch, spec.num_query_tiles, spec.num_key_tiles),
            num_parallel_axes=2,
            scalar_tables={"first_key_tile": first, "end_key_tile": end},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), scratch)
            + 12 * spec.tile_rows * spec.block_kv,
        )
    )
    output = _restore(results["output"], spec)[:, :tokens, :, : record.value_size]
    lse = _restore(results["lse"], spec)[:, :tokens, :, 0].swapaxes(1, 2)
    return with_sinks(record, output, lse)


def _inputs(record: TokenSparseAttention, spec: TokenSparseSpec) -> dict[str, Operand]:
    """Returns the kernel's inputs: tiles of queries with their lists, and the tiles of keys that they list."""
    key_tile = key_tile_index(spec.num_query_tiles)

    def rows_of_keys(array: jax.Array) -> Operand:
        return Operand(array, (None, spec.block_kv, array.shape[2]), lambda *step: (step[0], key_tile(*step), 0))

    query, lists, terms = plan.query_tiles(record, spec), plan.list_tiles(record, spec), plan.key_terms(record, spec)
    inputs = {
        "query": Operand(query, (None, None, *query.shape[2:]), lambda *step: (step[0], step[1], 0, 0, 0)),
        "indices": Operand(
            lists, (None, spec.num_lists, spec.block_q, lists.shape[3]), lambda *step: (step[0], 0, step[1], 0)
        ),
        "key": rows_of_keys(plan.finite_rows(record.key, spec.key_width, spec)),
        "key_terms": Operand(
            terms,
            (None, spec.kv_heads, None, *terms.shape[3:]),
            lambda *step: (step[0], 0, key_tile(*step), 0, 0),
        ),
    }
    if record.value is not None:
        inputs["value"] = rows_of_keys(plan.finite_rows(record.value, spec.value_width, spec))
    return inputs


def key_tile_index(num_query_tiles: int) -> Callable[..., Any]:
    """Returns the function from a grid step and the bounds of all tiles of queries to the tile of keys."""

    def key_tile(b: Any, i: Any, j: Any, first: Any, end: Any) -> Any:
        # Where a tile is not needed, the index is that of a neighbour, so that nothing is copied.
        tile = b * num_query_tiles + i
        return jnp.clip(j, first[tile], end[tile] - 1)

    return key_tile


def output_operands(record: TokenSparseAttention, shape: tuple[int, ...]) -> dict[str, Operand]:
    """Returns a kernel's outputs: rows of outputs, and lse in every lane.

    Args:
        record: The canonical arguments.
        shape: Batch rows, tiles of queries, and the axes of the rows of a tile.
    """
    widths = {"output": (pad_to_lanes(record.value_size), record.query.dtype), "lse": (LANES, jnp.float32)}
    return {
        name: Operand(
            jax.ShapeDtypeStruct((*shape, width), dtype),
            (None, None, *shape[2:], width),
            lambda *step: (step[0], step[1], *(0,) * (len(shape) - 1)),
        )
        for name, (width, dtype) in widths.items()
    }


def _restore(rows: jax.Array, spec: TokenSparseSpec) -> jax.Array:
    """Returns [B, tiles, Hk, rows, n] as [B, T, H, n]."""
    batch, width = rows.shape[0], rows.shape[4]
    rows = rows.reshape(batch, spec.num_query_tiles, spec.kv_heads, spec.block_q, spec.rows_per_query, width)
    rows = rows[..., : spec.group_size, :].swapaxes(2, 3)
    return rows.reshape(batch, -1, spec.kv_heads * spec.group_size, width)


def output_without_keys(record: TokenSparseAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record without a listed key."""
    batch, tokens, heads, _ = record.query.shape
    lse = jnp.full((batch, heads, tokens), -jnp.inf, jnp.float32)
    return with_sinks(record, jnp.zeros((batch, tokens, heads, record.value_size), record.query.dtype), lse)


def with_sinks(record: TokenSparseAttention, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals with the sinks in the denominators."""
    if record.softmax_aux is None:
        return output, SoftmaxResiduals(lse=lse)
    total = jnp.logaddexp(lse, record.softmax_aux.astype(jnp.float32)[:, None])
    share = jnp.where(total == -jnp.inf, 0, jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total)))
    return (output * share.swapaxes(1, 2)[..., None]).astype(output.dtype), SoftmaxResiduals(lse=total)
