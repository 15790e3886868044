"""Forward pass of paged attention on Hopper."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.planning import paged_cache
from ejkernel.planning.paged_cache import COMBINED
from ejkernel_pallas.gpu.hopper.launch import launch, matrix
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.latent_attention.combine import Parts, combined
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.latent_attention.spec import UNIT
from ejkernel_pallas.gpu.paged_attention.call import Call, Shared
from ejkernel_pallas.gpu.paged_attention.kernel import LOWEST, paged_kernel
from ejkernel_pallas.gpu.paged_attention.plan import make_plan
from ejkernel_pallas.gpu.paged_attention.prefill import prefill
from ejkernel_pallas.gpu.paged_attention.spec import HopperPaged, PagedSpec, make_spec

OPERANDS: tuple[str, ...] = ("query", "keys", "values", "tables", "items", "shares")
"""Operands of the kernel, in the order in which `attend` passes them."""


def forward(record: PagedAttention, params: HopperPaged) -> tuple[tuple[jax.Array, ...], None]:
    """Attention over pages of keys and values.

    Args:
        record: The canonical arguments.
        params: Programs and stages.

    Raises:
        ValueError: There is no program or no stage.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] float32 and the pages that were written, if any; no
        residuals.
    """
    record, pages = paged_cache.write(record)
    output, lse = attend(record, params)
    return (output, lse, *pages), None


def attend(record: PagedAttention, params: HopperPaged) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, Dv] and lse [T, H] of a record whose tokens are all in their pages.

    Sequences with few query tokens are the decoding kernel's, all others `prefill`'s.
    """
    spec, cache = make_spec(record, params), _cache(record)
    prefills = record.query_start is not None and record.query.shape[0] >= params.prefill_tokens
    few = paged_cache.RowLimits(1, params.prefill_tokens - 1) if prefills else None
    output, lse = _decoded(record, spec, cache, few)
    if not prefills:
        return output, lse
    many = paged_cache.RowLimits(params.prefill_tokens, record.query.shape[0])
    whole = prefill(record, spec, many, cache)
    sequence, _ = paged_cache.token_places(record)
    _, lengths = paged_cache.query_ranges(record)
    long = (sequence >= 0) & (lengths[jnp.maximum(sequence, 0)] >= params.prefill_tokens)
    return jnp.where(long[:, None, None], whole[0], output), jnp.where(long[:, None], whole[1], lse)


def _decoded(
    record: PagedAttention,
    spec: PagedSpec,
    cache: tuple[jax.Array, jax.Array],
    lengths: paged_cache.RowLimits | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of the sequences with so many query rows, None for all; anything in other rows."""
    tiles = paged_cache.query_tiles(record, spec.tokens, lengths=lengths)
    spec = dataclasses.replace(spec, rows=len(tiles.sequence))
    plan = make_plan(record, tiles, spec.programs)
    tables = jnp.zeros((1, 1), jnp.int32) if record.block_tables is None else record.block_tables.astype(jnp.int32)

    @sequential_vmap
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        operands: dict[str, jax.Array] = dict(zip(OPERANDS, arrays, strict=True))
        return combined(spec, LatentSchedule(*arrays[-2:]), Parts(*_launch(spec, operands)))

    output, lse = run(_query_rows(record, spec), *cache, tables, *plan)
    return _in_order(record, spec, tiles, output, lse)


def _cache(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Keys and values of three axes, which moves nothing: of a combined cache, pages, slots and all numbers of a slot.

    Of others: pages, slots and all heads of a slot; or all heads of all pages, slots and a head.
    """
    caches = record.key_pages, record.key_pages if record.value_pages is None else record.value_pages
    if record.kv_layout in (COMBINED, "pshd"):
        keys, values = (pages.reshape(*pages.shape[:2], -1) for pages in caches)
    else:
        keys, values = (pages.reshape(-1, *pages.shape[2:]) for pages in caches)
    return keys, values


def _query_rows(record: PagedAttention, spec: PagedSpec) -> jax.Array:
    """[Hk * query_rows, D]: of each KV head the rows of all tokens, and a tile of zeros behind them."""
    tokens, _, size = record.query.shape
    # Heads of a KV head together: 64 rows of it are then consecutive tokens, and one copy takes them. The zeros behind
    # let a tile that begins at the last token read 64 rows, too.
    rows = record.query.reshape(tokens, spec.tiles, -1, size).swapaxes(0, 1)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, spec.group - rows.shape[2]), (0, 0)))
    rows = rows.reshape(spec.tiles, tokens * spec.group, size)
    return jnp.pad(rows, ((0, 0), (0, WGMMA_M), (0, 0))).reshape(-1, size)


def _in_order(
    record: PagedAttention, spec: PagedSpec, tiles: paged_cache.QueryTiles, output: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and lse by query row, from those by item: [items, Hk * 64, Dv] and [items, Hk * 64]."""
    sequence, _ = paged_cache.token_places(record)
    owner, token = jnp.maximum(sequence, 0), jnp.arange(record.query.shape[0], dtype=jnp.int32)
    offset = token - paged_cache.query_ranges(record)[0][owner]
    item, row = tiles.first[owner] + offset // spec.tokens, offset % spec.tokens * spec.group
    rows = row[:, None] + jnp.arange(record.query.shape[1] // spec.tiles, dtype=jnp.int32)  # [T, heads of a KV head]
    # A gather by XLA: the kernel writes 64 rows an item whatever tokens it has, so no item overwrites another's rows.
    place = (item[:, None, None] * spec.tiles + jnp.arange(spec.tiles, dtype=jnp.int32)[:, None]) * WGMMA_M
    place = (place + rows[:, None]).reshape(token.shape[0], -1)  # [T, H]
    output, lse = output.reshape(-1, spec.value_dim)[place], lse.reshape(-1)[place]
    # What attended nothing has a maximum of about LOWEST, whatever its output is.
    attends = (sequence >= 0)[:, None] & (lse > LOWEST / 2)
    return jnp.where(attends[..., None], output, 0), jnp.where(attends, lse, -jnp.inf)


def _launch(spec: PagedSpec, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Outputs of whole items, and parts of the others."""

    def body(given: dict[str, Any], made: Any, buffers: dict[str, Any]) -> None:
        paged_kernel(Call(spec, given, made, Shared(**buffers)))

    parts, tiles = 2 * spec.blocks, spec.rows * spec.tiles
    outputs = [
        jax.ShapeDtypeStruct((tiles * WGMMA_M, spec.value_dim), spec.dtype),
        jax.ShapeDtypeStruct((tiles, WGMMA_M), jnp.float32),
        jax.ShapeDtypeStruct((parts, WGMMA_M, spec.value_dim), jnp.float32),
        jax.ShapeDtypeStruct((parts, WGMMA_M), jnp.float32),
    ]
    return launch(body, operands, outputs, _scratch(spec), spec.blocks, 1)


def _scratch(spec: PagedSpec) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `Shared`."""
    copies, stages, barrier = UNIT // spec.copied, spec.stages, plgpu.Barrier
    return {
        "q": matrix((WGMMA_M, spec.key_dim), spec.dtype),
        "k": matrix((stages, UNIT, spec.key_dim), spec.dtype),
        "v": matrix((stages, UNIT, spec.value_dim), spec.dtype),
        "present": plgpu.SMEM((stages,), jnp.int32),
        "q_full": barrier(num_arrivals=1),
        "q_free": barrier(num_arrivals=1),
        # A copy a page, and once more for the bits in `present`.
        "k_full": barrier(num_arrivals=copies + 1, num_barriers=stages),
        "k_free": barrier(num_arrivals=1, num_barriers=stages),
        "v_full": barrier(num_arrivals=copies, num_barriers=stages),
        "v_free": barrier(num_arrivals=1, num_barriers=stages),
    }
