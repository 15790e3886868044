"""The forward pass of paged attention on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, resident_operand
from ejkernel_pallas.tpu.mosaic.paged_layout import caches_as_stored
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged, tile_sizes_of
from ejkernel_pallas.tpu.paged_attention.kernels import operands
from ejkernel_pallas.tpu.paged_attention.kernels.attend_block import HEADS_PER_STEP
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import head_groups
from ejkernel_pallas.tpu.paged_attention.kernels.online_softmax import NUM_PRODUCT_BUFFERS, product_buffers
from ejkernel_pallas.tpu.paged_attention.kernels.paged_attention import paged_attention_kernel
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS, WorkList, make_work_list
from ejkernel_pallas.tpu.paged_attention.spec import PREFETCHED_BLOCKS, PagedSpec, make_spec

# Page indices are valid, and a bounds check takes longer than starting a copy.
COMPILER_OPTIONS = {"disable_bounds_checks": True}


def forward(record: PagedAttention, config: TpuPaged) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] and the updated pages, if any; no residuals.
    """
    # Tokens share words in a latent cache. A copy cannot write half a word, so XLA writes them, in place.
    record, written = paged_cache.write_new_tokens(record) if record.latent is not None else (record, ())
    spec = make_spec(record, tile_sizes_of(config))
    work = make_work_list(record, spec)
    # A mapped call runs sequentially: scalar memory has room for the tables of one.
    run = custom_batching.sequential_vmap(lambda record, work: tuple(_run_kernel(record, spec, work)))
    output, lse, *pages = run(record, work)
    shape = None if record.value_pages is not None else record.key_pages.shape
    pages = [x if shape is None else x.reshape(shape) for x in pages]
    results = (operands.unpack_outputs(record, spec, work, output), operands.unpack_lse(record, spec, work, lse))
    return (*results, *pages, *written), None


def _run_kernel(record: PagedAttention, spec: PagedSpec, work: WorkList) -> list[jax.Array]:
    """Runs the kernel: output [Hk, rows, Dv], lse [items, Hk, 1, rows of a tile], and the updated caches."""
    caches_by_name: dict[str, jax.Array] = dict(zip(("keys", "values"), caches_as_stored(record), strict=False))
    tokens = dict(zip(("new_keys", "new_values"), operands.pack_new_tokens(record), strict=False))
    query = operands.pack_queries(record, spec, work)
    # lse is written in whole rows of 128 lanes.
    lanes = cdiv(spec.rows_per_tile, LANES) * LANES
    outputs = {
        "output": jax.ShapeDtypeStruct((*query.shape[:2], spec.value_dim), record.query.dtype),
        "lse": jax.ShapeDtypeStruct((work.work_items.size // len(ITEM_FIELDS), spec.kv_heads, 1, lanes), jnp.float32),
    }
    written = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in caches_by_name.items()} if tokens else {}
    # A cache that the kernel writes to is an input that shares memory with an output; the kernel uses only the output's
    # ref.
    cache_inputs = {f"{name}_before" if written else name: x for name, x in caches_by_name.items()}
    constants = {name: resident_operand(x) for name, x in _resident_operands(record, spec).items()}
    results = launch(
        KernelCall(
            name="paged_attention",
            kernel=functools.partial(paged_attention_kernel, spec=spec),
            refs=PagedRefs,
            # One grid step per core; the loop over work items is inside the kernel.
            grid=(spec.num_cores,),
            parallel=1,
            tables={
                "work_items": work.work_items,
                "first_item_of_core": work.first_item_of_core,
                "page_table": work.page_table,
            }
            | ({} if work.context_lengths is None else {"context_lengths": work.context_lengths}),
            inputs=constants | {name: Operand(x) for name, x in {"query": query, **tokens, **cache_inputs}.items()},
            outputs={name: Operand(x) for name, x in {**outputs, **written}.items()},
            scratch=_scratch(record, spec, lanes, caches_by_name, bool(tokens)),
            aliases={f"{name}_before": name for name in written},
            options=COMPILER_OPTIONS,
        )
    )
    return list(results.values())


def _resident_operands(record: PagedAttention, spec: PagedSpec) -> dict[str, jax.Array]:
    """Returns the arrays that stay in VMEM during the whole kernel."""
    constants: dict[str, jax.Array] = {}
    if record.softmax_aux is not None:
        constants["sinks"] = operands.head_values_by_row(record.softmax_aux.astype(jnp.float32) * LOG2E, spec)
    if record.alibi_slopes is not None:
        # Added to scores as powers of two, or to the argument of the soft cap.
        factor = LOG2E if spec.soft_cap is None else 1 / spec.soft_cap
        constants["alibi_slopes"] = operands.head_values_by_row(record.alibi_slopes.astype(jnp.float32) * factor, spec)
    if spec.tokens_per_tile > 1:
        tokens = jnp.arange(spec.rows_per_tile, dtype=jnp.int32) // spec.group_size
        constants["token_of_row"] = jnp.broadcast_to(tokens[:, None], (spec.rows_per_tile, LANES))
    return constants


def _scratch(
    record: PagedAttention, spec: PagedSpec, lanes: int, caches_by_name: dict[str, jax.Array], writes: bool
) -> dict[str, Any]:
    """Returns the kernel's scratch memory."""
    heads, cache = spec.kv_heads, spec.cache_layout
    state = (heads, spec.rows_per_tile, LANES)
    scratch: dict[str, Any] = {
        "query_buffer": pltpu.VMEM((2, heads, spec.rows_per_tile, spec.head_dim), spec.operand_dtype),
        "output_buffer": pltpu.VMEM((2, heads, spec.rows_per_tile, spec.value_dim), record.query.dtype),
        "lse_buffer": pltpu.VMEM((2, heads, 1, lanes), jnp.float32),
        "row_max": pltpu.VMEM(state, jnp.float32),
        "row_sum": pltpu.VMEM(state, jnp.float32),
        "acc": pltpu.VMEM((heads, spec.rows_per_tile, spec.value_dim), jnp.float32),
    }
    chunks = heads // head_groups(spec) * spec.chunks_per_step
    rows, keys = cdiv(chunks, NUM_PRODUCT_BUFFERS) * spec.small_rows, spec.chunk_kv * spec.heads_per_product
    scratch["small_products"] = product_buffers(rows, keys, spec.weights_dtype)
    if spec.stores_score_limits:
        scratch["score_limits"] = pltpu.VMEM(
            (cache.heads_per_unit if cache.interleaved else 1, spec.small_rows, LANES), jnp.float32
        )
    if spec.tokens_per_tile == 1:
        scratch["key_mask"] = pltpu.VMEM((spec.chunks_per_step, spec.chunk_kv * spec.heads_per_product), jnp.float32)
    if spec.rows_per_tile > spec.small_rows:
        scratch["large_products"] = product_buffers(
            max(spec.row_block, HEADS_PER_STEP // NUM_PRODUCT_BUFFERS * spec.row_chunk),
            spec.part_kv,
            spec.weights_dtype,
        )
    scratch |= {f"{name}_buffer": _block_buffer(spec, x, name == "values") for name, x in caches_by_name.items()}
    if spec.rows_per_tile > spec.small_rows:
        scratch["head_keys"] = pltpu.VMEM((heads, spec.part_kv, spec.head_dim), spec.operand_dtype)
        scratch["head_values"] = pltpu.VMEM((heads, spec.part_kv, spec.value_dim), spec.weights_dtype)
    scratch |= {name: pltpu.SemaphoreType.DMA((2,)) for name in ("query_arrived", "results_sent")}
    scratch["pages_arrived"] = pltpu.SemaphoreType.DMA((PREFETCHED_BLOCKS + 1,))
    if writes:
        scratch |= {"write_counts": pltpu.SMEM((2,), jnp.int32), "tokens_written": pltpu.SemaphoreType.DMA}
    return scratch


def _block_buffer(spec: PagedSpec, stored: jax.Array, second: bool) -> Any:
    """Returns the scratch memory for blocks of the first or the second cache, of all pipeline stages."""
    if spec.cache_layout.in_columns(second):
        shape = (spec.kv_heads, stored.shape[1], spec.block_kv)
    elif spec.cache_layout.head_major:
        shape = (spec.kv_heads, spec.block_kv, stored.shape[-1])
    else:
        groups = cdiv(stored.shape[-1], LANES)
        shape = (groups, spec.pages_per_block, *stored.shape[1:-1], min(stored.shape[-1], LANES))
    return pltpu.VMEM((PREFETCHED_BLOCKS + 1, *shape), stored.dtype)
