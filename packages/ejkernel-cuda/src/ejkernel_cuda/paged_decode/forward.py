"""The FFI call of paged decode attention (csrc/paged_decode/paged_decode.cu)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.planning.in_place import call_unfused
from ejkernel_cuda.dense_decode.config import HEADS_PER_BLOCK
from ejkernel_cuda.dense_decode.forward import UNBOUNDED_WINDOW
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid, thread_blocks_and_queues


def forward(record: PagedAttention, config: PagedDecodeGrid) -> tuple[tuple[jax.Array, ...], None]:
    """Returns output [T, H, Dv], lse [T, H] and, if new tokens are written, the updated pages.

    A first launch writes the new tokens into their slots. Partial results of work items that several blocks share, and
    flags that say when those are complete, are further outputs of the call, so that XLA allocates all of its memory:
    two per block, for any lengths.
    """
    num_thread_blocks, num_queues = thread_blocks_and_queues(record, config)
    cache_arrays = (record.key_pages,) if record.value_pages is None else (record.key_pages, record.value_pages)
    new_tokens = () if record.new_keys is None else (record.new_keys, record.new_values)
    # Operands 1 and 2 are the cache. If new tokens are written, they alias results: the update is in place if the
    # caller donates the cache.
    written_caches = cache_arrays if new_tokens else ()
    shapes = result_shapes(record, num_thread_blocks)
    call = functools.partial(
        jax.ffi.ffi_call(
            register_handler("ejkernel_paged_decode"),
            (*shapes, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written_caches)),
            input_output_aliases={1 + n: len(shapes) + n for n in range(len(written_caches))},
            # Each batch element has a cache, and a vectorised call would copy all of them.
            vmap_method="sequential",
        ),
        **scalar_attributes(record, num_queues),
        cache_heads=np.int32(record.key_pages.shape[record.kv_layout.index("h")]),
    )
    operands = (
        record.query,
        record.key_pages,
        # Empty if the array of keys also has the values.
        jnp.zeros(0, record.key_pages.dtype) if record.value_pages is None else record.value_pages,
        *sequence_operands(record),
        *(x.astype(record.key_pages.dtype) for x in new_tokens if x is not None),
    )
    output, lse, *other_results = call_unfused(call, *operands) if written_caches else call(*operands)
    return (output, lse, *other_results[3:]), None


def result_shapes(record: PagedAttention, num_thread_blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of output, lse, and the partial results that blocks exchange."""
    (rows, heads, _), size = record.query.shape, paged_cache.value_head_dim(record)
    return (
        jax.ShapeDtypeStruct((rows, heads, size), record.query.dtype),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        jax.ShapeDtypeStruct((2 * num_thread_blocks, HEADS_PER_BLOCK, size), jnp.float32),
        jax.ShapeDtypeStruct((2 * num_thread_blocks, HEADS_PER_BLOCK, 2), jnp.float32),
        jax.ShapeDtypeStruct((2 * num_thread_blocks, 2), jnp.int32),
    )


def sequence_operands(record: PagedAttention) -> tuple[jax.Array, ...]:
    """Returns tables, lengths, starts, first query rows and number of sequences, and sinks."""
    live = None if record.num_seqs is None else record.num_seqs.reshape(-1)
    numbers = (record.block_tables, record.kv_lens, record.kv_starts, record.query_start, live)
    sinks = jnp.zeros(0, jnp.float32) if record.softmax_aux is None else record.softmax_aux.astype(jnp.float32)
    return (*(_as_int32(x) for x in numbers), sinks)


def scalar_attributes(record: PagedAttention, num_queues: int) -> dict[str, Any]:
    """Returns the scalar attributes of the call."""
    left, right = causal_window_bounds(record)
    return {
        "strides": np.array(cache_strides(record), np.int64),
        "kv_heads": np.int32(paged_cache.kv_heads(record)),
        "pages": np.int32(paged_cache.page_count(record)),
        "page_size": np.int32(paged_cache.page_size(record)),
        "lines": np.int32(num_queues),
        "left": np.int32(UNBOUNDED_WINDOW if left is None else min(left, UNBOUNDED_WINDOW)),
        "right": np.int32(UNBOUNDED_WINDOW if right is None else max(min(right, UNBOUNDED_WINDOW), -UNBOUNDED_WINDOW)),
        "scale": np.float32(record.softmax_scale),
        "cap": np.float32(record.logits_soft_cap or 0.0),
        "value_scale": np.float32(record.value_scale),
    }


def _as_int32(x: jax.Array | None) -> jax.Array:
    """Converts to int32; an absent array becomes an empty one."""
    return jnp.zeros(0, jnp.int32) if x is None else x.astype(jnp.int32)


def cache_strides(record: PagedAttention) -> tuple[int, ...]:
    """Returns strides of pages, slots and heads, of keys and of values, in elements, and the offset of the first
    value.
    """
    values = record.key_pages if record.value_pages is None else record.value_pages
    first = record.key_pages.shape[-1] if record.value_pages is None else 0
    return (
        *_page_slot_head_strides(record.key_pages, record.kv_layout),
        *_page_slot_head_strides(values, record.kv_layout),
        first,
    )


def _page_slot_head_strides(pages: jax.Array, layout: str) -> tuple[int, ...]:
    return tuple(math.prod(pages.shape[layout.index(axis) + 1 :]) for axis in "psh")
