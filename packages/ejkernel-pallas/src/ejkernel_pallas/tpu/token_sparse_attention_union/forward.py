"""Forward pass of latent token-sparse attention on TPUs by the union of the lists of neighbouring queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.token_sparse_attention.forward import (
    key_tile_index,
    output_operands,
    output_without_keys,
    with_sinks,
)
from ejkernel_pallas.tpu.token_sparse_attention.plan import key_tile_bounds
from ejkernel_pallas.tpu.token_sparse_attention_union import plan
from ejkernel_pallas.tpu.token_sparse_attention_union.config import GROUP, TpuTokenSparseUnion
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.attend_union import attend_union
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.refs import UnionRefs
from ejkernel_pallas.tpu.token_sparse_attention_union.spec import UnionSpec, make_spec


def forward(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles.

    Returns:
        [B, T, H, Dv] in the query's dtype, and lse [B, H, T] float32.
    """
    if not record.query.size or not record.key.size or not record.indices.size:
        return output_without_keys(record)
    (batch, tokens, heads, _), spec = record.query.shape, make_spec(record, config)
    inputs, scratch = _inputs(record, spec), _scratch(record, spec)
    outputs = output_operands(record, (batch, spec.num_query_tiles, spec.tile_rows))
    first, end = key_tile_bounds(record, spec.block_q, spec.block_kv, spec.num_key_tiles)
    results = launch(
        KernelCall(
            name="ejkernel_token_sparse_attention_union",
            kernel=functools.partial(attend_union, spec=spec),
            refs=UnionRefs,
            grid=(batch, spec.num_query_tiles, spec.num_key_tiles),
            num_parallel_axes=2,
            scalar_tables={"first_key_tile": first, "end_key_tile": end},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), scratch)
            + 12 * spec.product_rows * spec.product_keys,
        )
    )
    shape = (batch, spec.num_query_tiles * spec.block_q, spec.rows_per_query)
    output = results["output"].reshape(*shape, spec.value_width)[:, :tokens, :heads, : record.value_size]
    lse = results["lse"].reshape(*shape, LANES)[:, :tokens, :heads, 0].swapaxes(1, 2)
    return with_sinks(record, output, lse)


def _inputs(record: TokenSparseAttention, spec: UnionSpec) -> dict[str, Operand]:
    """Returns the kernel's inputs: tiles of queries with their lists, and the tiles of keys that they list."""
    key_tile, (key, flags) = key_tile_index(spec.num_query_tiles), plan.finite_keys(record, spec)
    return {
        "query": Operand(
            plan.query_tiles(record, spec),
            (None, None, spec.tile_rows, spec.key_width),
            lambda *step: (step[0], step[1], 0, 0),
        ),
        "indices": Operand(
            plan.list_tiles(record, spec),
            (None, spec.block_q, spec.list_length),
            lambda *step: (step[0], step[1], 0),
        ),
        "key": Operand(key, (None, spec.block_kv, spec.key_width), lambda *step: (step[0], key_tile(*step), 0)),
        "is_not_finite": Operand(flags, (None, None, *flags.shape[2:]), lambda *step: (step[0], key_tile(*step), 0, 0)),
    }


def _scratch(record: TokenSparseAttention, spec: UnionSpec) -> dict[str, Any]:
    """Returns the kernel's scratch memory."""
    dtype, rows = record.query.dtype, spec.tile_rows
    return {
        "counts": pltpu.VMEM((spec.all_count_rows, spec.block_q, LANES), jnp.float32),
        "not_finite_counts": pltpu.VMEM((spec.block_q, LANES), jnp.float32),
        "is_before": pltpu.VMEM((GROUP, GROUP), jnp.bfloat16),
        "tail": pltpu.VMEM((spec.block_kv, LANES), dtype),
        "slots": pltpu.VMEM((spec.block_kv // GROUP, GROUP), jnp.int32),
        "union": pltpu.VMEM((spec.union_slots, spec.key_width), dtype),
        "row_max": pltpu.VMEM((rows, LANES), jnp.float32),
        "row_sum": pltpu.VMEM((rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((rows, spec.value_width), jnp.float32),
        "group_counts": pltpu.SMEM((spec.block_kv // GROUP,), jnp.int32),
        "union_end": pltpu.SMEM((1,), jnp.int32),
    }
