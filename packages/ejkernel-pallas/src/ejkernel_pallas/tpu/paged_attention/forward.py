"""The forward pass of paged attention on TPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.mask_functions import with_windows_of_function
from ejkernel.families.paged_attention.rotation import rotate_back, rotate_queries
from ejkernel.families.paged_attention.shared_prefix import SharedPrefix, positions_and_contexts_of_rows, split_prefix
from ejkernel.planning.softmax_merge import PartialAttention, merge
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, resident_operand
from ejkernel_pallas.tpu.mosaic.paged_functions import (
    BY_KEY,
    BY_QUERY,
    values_by_head,
    values_by_key,
    values_by_query,
)
from ejkernel_pallas.tpu.mosaic.paged_layout import caches_by_ref_name
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged, prefix_config, tile_sizes_of
from ejkernel_pallas.tpu.paged_attention.kernels import operands
from ejkernel_pallas.tpu.paged_attention.kernels.attend_block import EQUAL_HEADS_PER_STEP, HEADS_PER_STEP
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import num_head_groups
from ejkernel_pallas.tpu.paged_attention.kernels.online_softmax import NUM_PRODUCT_BUFFERS, product_buffers
from ejkernel_pallas.tpu.paged_attention.kernels.paged_attention import paged_attention_kernel
from ejkernel_pallas.tpu.paged_attention.kernels.pair_bias import bias_tokens_per_copy
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.kernels.write_codes import write_code_pages
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS, WorkList, make_work_list
from ejkernel_pallas.tpu.paged_attention.spec import PREFETCHED_BLOCKS, PagedSpec, RowTerms, make_spec

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
    given, record = record, rotate_queries(with_windows_of_function(record))
    # Tokens share words in a latent cache. A copy cannot write half a word, so XLA writes them, in place.
    written: tuple[jax.Array, ...] = ()
    if record.latent is not None:
        record, written = paged_cache.write_new_tokens(record)
    elif record.code_bits is not None and record.new_keys is not None:
        record, written = write_code_pages(record)
    sizes, values = tile_sizes_of(config), values_by_query(record)
    if record.shared_prefix is None:
        output, lse, *pages = _attend(record, make_spec(record, sizes), values)
        return (rotate_back(given, output), lse, *pages, *written), None
    prefix, suffix = split_prefix(record, masks_empty_sequences=False)
    output, lse, *pages = _attend(suffix, make_spec(suffix, sizes, output_dtype=jnp.float32), values)
    # After the write, which is in place only if nothing reads the pages as they were.
    caches = dict(zip(("key_pages", "value_pages"), pages, strict=False))
    prefix = dataclasses.replace(prefix, record=dataclasses.replace(prefix.record, **caches))
    rows = positions_and_contexts_of_rows(record)
    output, lse = _merge_prefix(record, _attend_prefix(prefix, rows, values), (output, lse))
    return (rotate_back(given, output), lse, *pages, *written), None


def _attend_prefix(prefix: SharedPrefix, rows: jax.Array, values: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of all query rows over the keys of a shared prefix.

    Args:
        prefix: The prefix.
        rows: [T, 2] int32, position and context of each query row in its own sequence.
        values: int32 [T, H, n], values that functions read by query, or None.
    """
    record = prefix.record
    masks = causal_window_bounds(record)[0] is not None or record.chunk_size is not None
    if not masks:  # all keys come before all queries
        record = dataclasses.replace(record, causal=False, sliding_window=None)
    reads_positions = record.score_mod is not None or record.mask_mod is not None
    by_row = RowTerms(positions=masks or reads_positions, contexts=record.alibi_slopes is not None)
    spec = make_spec(record, tile_sizes_of(prefix_config(record)), row_terms=by_row, output_dtype=jnp.float32)
    output, lse = _attend(record, spec, values, rows)
    return output, lse


def _merge_prefix(
    record: PagedAttention, prefix: tuple[jax.Array, jax.Array], suffix: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges output [T, H, Dv] and lse [T, H] over a shared prefix and over the keys after it."""
    is_query = positions_and_contexts_of_rows(record)[:, 0] >= 0
    # The query row of a sequence without tokens may hold NaN, and 0 times NaN is NaN.
    output = jnp.where(is_query[:, None, None], prefix[0], 0)
    lse = jnp.where(is_query[:, None], prefix[1], -jnp.inf)
    output, lse = merge(*(PartialAttention(x[None], y.T[None]) for x, y in ((output, lse), suffix)))
    return output[0].astype(record.query.dtype), lse[0].T


def _attend(
    record: PagedAttention, spec: PagedSpec, values: jax.Array | None, row_positions: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Returns output [T, H, Dv], lse [T, H] and the updated pages, if the kernel writes new tokens.

    Args:
        record: The record, without a shared prefix.
        spec: The kernel's constants.
        values: int32 [T, H, n], values that functions read by query; None if there are none.
        row_positions: [T, 2] int32, position and context of each query row, if the spec has terms by row.
    """
    positions = None if row_positions is None or not spec.has_row_positions else row_positions[:, 0]
    work = make_work_list(record, spec, positions)
    if not (spec.has_row_positions or spec.has_row_contexts):
        row_positions = None
    # A mapped call runs sequentially: scalar memory has room for the tables of one.
    run = custom_batching.sequential_vmap(lambda *arrays: tuple(_run_kernel(spec, *arrays)))
    output, lse, *pages = run(record, work, values, row_positions)
    shape = None if record.value_pages is not None else record.key_pages.shape
    pages = [x if shape is None else x.reshape(shape) for x in pages]
    return operands.unpack_outputs(record, spec, work, output), operands.unpack_lse(record, spec, work, lse), *pages


def _run_kernel(
    spec: PagedSpec,
    record: PagedAttention,
    work: WorkList,
    values: jax.Array | None,
    row_positions: jax.Array | None,
) -> list[jax.Array]:
    """Runs the kernel: output [Hk, rows, Dv], lse [items, Hk, 1, rows of a tile], and the updated caches."""
    caches_by_name = caches_by_ref_name(record)
    tokens = dict(zip(("new_keys", "new_values"), operands.pack_new_tokens(record), strict=False))
    query = operands.pack_queries(record, spec, work)
    terms = _terms_in_hbm(record, spec, work, values, row_positions)
    # lse is written in whole rows of 128 lanes.
    lanes = cdiv(spec.rows_per_tile, LANES) * LANES
    outputs = {
        "output": jax.ShapeDtypeStruct((*query.shape[:2], spec.value_dim), spec.output_dtype),
        "lse": jax.ShapeDtypeStruct((work.work_items.size // len(ITEM_FIELDS), spec.kv_heads, 1, lanes), jnp.float32),
    }
    written = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in caches_by_name.items()} if tokens else {}
    # A cache that the kernel writes to is an input that shares memory with an output; the kernel uses only the output's
    # ref.
    cache_inputs = {f"{name}_before" if written else name: x for name, x in caches_by_name.items()}
    in_hbm = {"query": query, **terms, **tokens, **cache_inputs}
    constants = {name: resident_operand(x) for name, x in _resident_operands(record, spec).items()}
    results = launch(
        KernelCall(
            name="paged_attention",
            kernel=functools.partial(paged_attention_kernel, spec=spec),
            refs=PagedRefs,
            # One grid step per core; the loop over work items is inside the kernel.
            grid=(spec.num_cores,),
            num_parallel_axes=1,
            scalar_tables=_tables(work),
            inputs=constants | {name: Operand(x) for name, x in in_hbm.items()},
            outputs={name: Operand(x) for name, x in {**outputs, **written}.items()},
            scratch=kernel_scratch(spec, lanes, caches_by_name, bool(tokens)),
            aliases={f"{name}_before": name for name in written},
            compiler_params=COMPILER_OPTIONS,
        )
    )
    return list(results.values())


def _terms_in_hbm(
    record: PagedAttention, spec: PagedSpec, work: WorkList, values: jax.Array | None, row_positions: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the arrays of terms of the scores that the kernel copies with queries and keys."""
    terms = {} if row_positions is None else operands.pack_row_terms(row_positions, spec, work)
    if spec.pair_bias_columns:
        terms["pair_bias"] = operands.pack_pair_bias(record, spec, work)
    if values is not None:
        terms["function_rows_by_query"] = operands.pack_values_by_query(values, spec, work)
    by_key = values_by_key(record, spec.heads, spec.block_kv)
    return terms if by_key is None else {**terms, "function_rows_by_key": by_key}


def _tables(work: WorkList) -> dict[str, jax.Array]:
    """Returns the arrays in scalar memory."""
    tables = {
        "work_items": work.work_items,
        "first_item_of_core": work.first_item_of_core,
        "page_table": work.page_table,
    }
    return tables if work.context_lengths is None else {**tables, "context_lengths": work.context_lengths}


def _resident_operands(record: PagedAttention, spec: PagedSpec) -> dict[str, jax.Array]:
    """Returns the arrays that stay in VMEM during the whole kernel."""
    constants: dict[str, jax.Array] = {}
    if record.softmax_aux is not None:
        sinks = record.softmax_aux.astype(jnp.float32) * operands.softmax_unit(spec)
        constants["sinks"] = operands.head_values_by_row(sinks, spec)
    for name, codebook in (("key_table", record.key_codebook), ("value_table", record.value_codebook)):
        if codebook is not None:
            constants[name] = operands.code_table(codebook)
    if record.alibi_slopes is not None:
        slopes = record.alibi_slopes.astype(jnp.float32) * operands.score_unit(spec)
        constants["alibi_slopes"] = operands.head_values_by_row(slopes, spec)
    by_head = values_by_head(record)
    if by_head is not None:
        constants["function_rows_by_head"] = operands.pack_values_by_head(by_head, spec)
    if spec.tokens_per_tile > 1 and not spec.has_row_positions:
        tokens = jnp.arange(spec.rows_per_tile, dtype=jnp.int32) // spec.group_size
        constants["token_of_row"] = jnp.broadcast_to(tokens[:, None], (spec.rows_per_tile, LANES))
    return constants


def kernel_scratch(spec: PagedSpec, lanes: int, caches_by_name: dict[str, jax.Array], writes: bool) -> dict[str, Any]:
    """Returns the kernel's scratch memory."""
    heads, cache = spec.kv_heads, spec.cache_layout
    state = (heads, spec.rows_per_tile, LANES)
    scratch: dict[str, Any] = {
        "query_buffer": pltpu.VMEM((2, heads, spec.rows_per_tile, spec.head_dim), spec.operand_dtype),
        "output_buffer": pltpu.VMEM((2, heads, spec.rows_per_tile, spec.value_dim), spec.output_dtype),
        "lse_buffer": pltpu.VMEM((2, heads, 1, lanes), jnp.float32),
        "row_max": pltpu.VMEM(state, jnp.float32),
        "row_sum": pltpu.VMEM(state, jnp.float32),
        "acc": pltpu.VMEM((heads, spec.rows_per_tile, spec.value_dim), jnp.float32),
    }
    # Where products are equal, all are those of whole tiles.
    chunks = EQUAL_HEADS_PER_STEP if spec.has_equal_products else heads // num_head_groups(spec) * spec.chunks_per_step
    rows, keys = cdiv(chunks, NUM_PRODUCT_BUFFERS) * spec.smallest_product_rows, spec.chunk_kv * spec.heads_per_product
    scratch["small_product_buffers"] = product_buffers(rows, keys, spec.weights_dtype)
    if spec.stores_score_limits:
        masks = cache.kv_heads_per_word_row if cache.interleaves_keys_and_values else 1
        scratch["score_limits"] = pltpu.VMEM((masks, spec.smallest_product_rows, LANES), jnp.float32)
    if spec.tokens_per_tile == 1:
        scratch["key_mask"] = pltpu.VMEM((spec.chunks_per_step, spec.chunk_kv * spec.heads_per_product), jnp.float32)
    if spec.rows_per_tile > spec.smallest_product_rows and not spec.has_equal_products:
        scratch["large_product_buffers"] = product_buffers(
            max(spec.unmasked_product_rows, HEADS_PER_STEP // NUM_PRODUCT_BUFFERS * spec.masked_product_rows),
            spec.part_kv,
            spec.weights_dtype,
        )
    scratch |= {f"{name}_buffer": _block_buffer(spec, x, name == "values") for name, x in caches_by_name.items()}
    if cache.codes is not None:
        scratch["value_norm_rows"] = pltpu.VMEM((heads, spec.block_kv), jnp.float32)
    if spec.rows_per_tile > spec.smallest_product_rows or spec.has_equal_products:
        scratch["head_keys"] = pltpu.VMEM((heads, spec.part_kv, spec.head_dim), spec.operand_dtype)
        scratch["head_values"] = pltpu.VMEM((heads, spec.part_kv, spec.value_dim), spec.weights_dtype)
    scratch |= _scratch_of_row_terms(spec)
    scratch |= {name: pltpu.SemaphoreType.DMA((2,)) for name in ("query_arrived", "results_sent")}
    scratch["pages_arrived"] = pltpu.SemaphoreType.DMA((PREFETCHED_BLOCKS + 1,))
    if writes:
        scratch |= {"write_counts": pltpu.SMEM((2,), jnp.int32), "tokens_written": pltpu.SemaphoreType.DMA}
    return scratch


def _scratch_of_row_terms(spec: PagedSpec) -> dict[str, Any]:
    """Returns the scratch memory of the bias for pairs, of what each row has for itself, and of functions."""
    scratch: dict[str, Any] = {}
    if spec.pair_bias_columns:
        size = bias_tokens_per_copy(spec)
        tokens = cdiv(spec.tokens_per_tile, size) * size
        scratch["pair_bias_buffer"] = pltpu.VMEM((PREFETCHED_BLOCKS + 1, tokens, 1, spec.block_kv + LANES), jnp.float32)
        rows = 1 if spec.tokens_per_tile == 1 else spec.rows_per_tile
        scratch["row_bias"] = pltpu.VMEM((spec.chunks_per_step, rows, spec.chunk_kv), jnp.float32)
        scratch["pair_bias_arrived"] = pltpu.SemaphoreType.DMA((PREFETCHED_BLOCKS + 1,))
    if spec.has_row_positions:
        scratch["position_buffer"] = pltpu.VMEM((2, spec.rows_per_tile, LANES), jnp.int32)
    if spec.has_row_contexts:
        scratch["context_buffer"] = pltpu.VMEM((2, spec.rows_per_tile, LANES), jnp.float32)
    if spec.functions is not None and spec.functions.has_rows(BY_QUERY):
        shape = (2, spec.functions.num_planes(spec.kv_heads), spec.rows_per_tile, LANES)
        scratch["function_queries_buffer"] = pltpu.VMEM(shape, jnp.int32)
    if spec.functions is not None and spec.functions.has_rows(BY_KEY):
        shape = (PREFETCHED_BLOCKS + 1, spec.functions.num_lines(spec.heads), 1, spec.block_kv)
        scratch["function_keys_buffer"] = pltpu.VMEM(shape, jnp.int32)
        scratch["function_keys_arrived"] = pltpu.SemaphoreType.DMA((PREFETCHED_BLOCKS + 1,))
    return scratch


def _block_buffer(spec: PagedSpec, cache_array: jax.Array, is_second_cache: bool) -> Any:
    """Returns the scratch memory for blocks of the first or the second cache, of all pipeline stages."""
    if spec.cache_layout.codes is not None:
        shape = (*cache_array.shape[1:-1], spec.block_kv)
    elif spec.cache_layout.has_tokens_along_lanes(is_second_cache):
        shape = (spec.kv_heads, cache_array.shape[1], spec.block_kv)
    elif spec.cache_layout.is_head_major:
        shape = (spec.kv_heads, spec.block_kv, cache_array.shape[-1])
    else:
        groups = cdiv(cache_array.shape[-1], LANES)
        shape = (groups, spec.pages_per_block, *cache_array.shape[1:-1], min(cache_array.shape[-1], LANES))
    return pltpu.VMEM((PREFETCHED_BLOCKS + 1, *shape), cache_array.dtype)
