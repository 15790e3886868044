"""Forward pass of latent attention on Hopper."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import RotaryColumns, as_paged_record, rotary_columns_of
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_pallas.gpu.hopper.launch import launch, wgmma_operand_smem
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.latent_attention.config import HopperLatent
from ejkernel_pallas.gpu.latent_attention.kernels.call import Call, SharedMemory
from ejkernel_pallas.gpu.latent_attention.kernels.latent_attention import latent_kernel
from ejkernel_pallas.gpu.latent_attention.kernels.schedule import make_schedule_in_kernel
from ejkernel_pallas.gpu.latent_attention.kernels.split_combine import KernelOutputs, combine_partial_results
from ejkernel_pallas.gpu.latent_attention.plan import MAX_ITEMS_PLANNED_IN_KERNEL, LatentSchedule, make_schedule
from ejkernel_pallas.gpu.latent_attention.spec import (
    BLOCK_KV,
    CHUNK_COLUMNS,
    CHUNKS_PER_HALF,
    CONSUMER_WARPGROUPS,
    LATENT_DIM,
    MASKED_SCORE,
    PIECES_PER_HALF,
    ROTARY_DIM,
    LatentSpec,
    make_spec,
)

OPERAND_NAMES: tuple[str, ...] = ("query", "latent", "rotary", "tables", "items", "shares")
"""Names of the kernel's operands, in the order in which `attend` passes them."""


def forward(record: PagedAttention, params: HopperLatent) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention over pages of latent vectors.

    Args:
        record: The canonical arguments.
        params: Programs.

    Raises:
        ValueError: The configuration has no program.

    Returns:
        Output [T, H, 512] in the query's dtype, lse [T, H] float32 and the updated pages, if any; no residuals.
    """
    record, pages = paged_cache.write_new_tokens(record)
    rotary = rotary_columns_of(record)
    assert rotary is not None
    output, lse = attend(record, rotary, params)
    return (output, lse, *pages), None


def forward_dense_cache(record: TiledAttention, params: HopperLatent) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output [B, 1, H, 512] and residuals of a record of `mla_decode`.

    With one cache all 576 columns are values, of which the operation reads the first 512. XLA computes the others, and
    drops their products if nothing reads them, as in every call of the operation.
    """
    pages, rotary = as_paged_record(record)
    output, lse = attend(pages, rotary, params)
    output = output[:, None]
    if record.value.shape[-1] > LATENT_DIM:
        # In the output's own shape: XLA simplifies a slice of a concatenation, but not with a reshape between them.
        output = jnp.concatenate((output, _rotary_output(pages, lse)[:, None]), axis=-1)
    return output, SoftmaxResiduals(lse=lse[:, :, None])


def _rotary_output(record: PagedAttention, lse: jax.Array) -> jax.Array:
    """Returns output [B, H, 64] of the columns after the 512 of a dense cache; its weights are `exp(score - lse)`."""
    cache = record.key_pages
    token = jnp.arange(cache.shape[1], dtype=jnp.int32)
    is_attended = token < record.kv_lens[:, None]
    if record.kv_starts is not None:
        is_attended = is_attended & (token >= record.kv_starts[:, None])
    # Padding slots may hold NaN, and a weight of zero times NaN is NaN.
    cache = jnp.where(is_attended[:, :, None], cache, 0)
    scores = jnp.einsum("bhd,bsd->bhs", record.query, cache, preferred_element_type=jnp.float32)
    # A row without keys has lse -inf, and -inf - -inf is NaN.
    finite_lse = jnp.where(jnp.isfinite(lse), lse, 0.0)[:, :, None]
    weights = jnp.where(is_attended[:, None], jnp.exp(scores * record.softmax_scale - finite_lse), 0.0)
    weights = weights.astype(cache.dtype)
    output = jnp.einsum("bhs,bsd->bhd", weights, cache[..., LATENT_DIM:], preferred_element_type=jnp.float32)
    return output.astype(record.query.dtype)


def attend(record: PagedAttention, rotary_keys: RotaryColumns, params: HopperLatent) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, H, 512] and lse [T, H] of a record without new tokens."""
    spec = make_spec(record, params, rotary_keys.start)
    plan = (make_schedule_in_kernel if spec.num_items <= MAX_ITEMS_PLANNED_IN_KERNEL else make_schedule)(record, spec)
    tables = jnp.zeros((1, 1), jnp.int32) if record.block_tables is None else record.block_tables.astype(jnp.int32)

    @sequential_vmap
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        operands: dict[str, jax.Array] = dict(zip(OPERAND_NAMES, arrays, strict=True))
        return combine_partial_results(
            spec, LatentSchedule(*arrays[-2:]), KernelOutputs(*_launch(spec, operands)), spec.stored_rows_per_tile
        )

    output, lse = run(record.query, record.key_pages, rotary_keys.rows, tables, *plan)
    # Without keys the kernel's lse is that of masked scores, about MASKED_SCORE. So is that of a row whose pages are
    # all absent.
    return output, jnp.where((plan.items[:, 1:2] > 0) & (lse > MASKED_SCORE / 2), lse, -jnp.inf)


def _launch(spec: LatentSpec, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the outputs of whole items and the partial results of split items."""

    def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
        latent_kernel(Call(spec, operand_refs, output_refs, SharedMemory(**buffers)))

    parts = 2 * spec.num_thread_blocks
    outputs = [
        jax.ShapeDtypeStruct((spec.num_items * spec.tiles_per_item * WGMMA_M, LATENT_DIM), spec.dtype),
        jax.ShapeDtypeStruct((spec.num_items * spec.tiles_per_item, WGMMA_M), jnp.float32),
        jax.ShapeDtypeStruct((parts, WGMMA_M, LATENT_DIM), jnp.float32),
        jax.ShapeDtypeStruct((parts, WGMMA_M), jnp.float32),
    ]
    return launch(body, operands, outputs, _scratch(spec), spec.num_thread_blocks, CONSUMER_WARPGROUPS)


def _scratch(spec: LatentSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `SharedMemory`."""
    copies = BLOCK_KV // spec.slots_per_copy
    pieces, halves = 2 * PIECES_PER_HALF, (2, CHUNKS_PER_HALF, BLOCK_KV, CHUNK_COLUMNS)
    make_barrier = plgpu.Barrier
    return {
        "query_chunks": wgmma_operand_smem((2 * CHUNKS_PER_HALF + 1, WGMMA_M, CHUNK_COLUMNS), spec.dtype),
        "key_left_half_chunks": wgmma_operand_smem(halves, spec.dtype),
        "key_right_half_chunks": wgmma_operand_smem(halves, spec.dtype),
        # Queries and two blocks of keys take 216 KiB of 227, so weights reuse the memory of the rotary columns.
        "rotary_columns": wgmma_operand_smem((2, BLOCK_KV, ROTARY_DIM), spec.dtype),
        "row_max": plgpu.SMEM((2, WGMMA_M), jnp.float32),
        "row_sum": plgpu.SMEM((2, WGMMA_M), jnp.float32),
        "valid_key_bits": plgpu.SMEM((2,), jnp.int32),
        # Arrivals are counted per warpgroup and per copy: of queries, one copy per chunk. Both consumers must free
        # them.
        "q_full": make_barrier(num_arrivals=2 * CHUNKS_PER_HALF + 1),
        "q_free": make_barrier(num_arrivals=CONSUMER_WARPGROUPS),
        # One copy per page and chunk; for the rotary columns, one more arrival for the bits in `valid_key_bits`.
        "half_read_by_one_warpgroup_full": make_barrier(
            num_arrivals=copies * CHUNKS_PER_HALF // PIECES_PER_HALF, num_barriers=pieces
        ),
        "half_read_by_both_warpgroups_full": make_barrier(
            num_arrivals=copies * CHUNKS_PER_HALF // PIECES_PER_HALF, num_barriers=pieces
        ),
        "rotary_full": make_barrier(num_arrivals=copies + 1, num_barriers=2),
        # One arrival: a single warpgroup is the last to read each half.
        "half_read_by_one_warpgroup_free": make_barrier(num_arrivals=1, num_barriers=2),
        "half_read_by_both_warpgroups_free": make_barrier(num_arrivals=1, num_barriers=2),
        "weights_full": make_barrier(num_arrivals=1, num_barriers=2),
        "row_sums_full": make_barrier(num_arrivals=1, num_barriers=2),
    }
