"""Backward pass of token-sparse attention in Triton, without atomics.

Queries have a kernel like the forward pass's. For keys and values, each entry of a list first gets a gradient of its
own, chunk by chunk of the queries; then the entries of each key are added, in the order of the queries.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat as core_compat
from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention, sink_gradient, softmax_gradient_terms
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.sizes import pad_to_power_of_two
from ejkernel_triton.token_sparse_attention.config import SparseBackward
from ejkernel_triton.token_sparse_attention.forward import key_and_value_inputs
from ejkernel_triton.token_sparse_attention.plan import entry_dtype, order_entries_by_key, queries_per_chunk
from ejkernel_triton.token_sparse_attention.spec import make_spec, value_is_first_tile

PerQueryInputs = tuple[jax.Array, jax.Array, jax.Array]

MAX_COLUMNS_PER_SUM = 4096
"""Columns of a program that sums entries: 32 registers per thread of four warps."""


def backward(pullback: Pullback, config: SparseBackward) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output, the cotangents of output and lse, and the requested names.
        config: Tiles, warps and stages of both kernels.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, terms = pullback.record, softmax_gradient_terms(pullback)
    per_query_inputs = (pullback.cotangent, terms.lse * LOG2E, terms.delta)
    gradients: dict[str, Any] = {"softmax_aux": sink_gradient(record, terms)}
    if "query" in pullback.grad_fields:
        gradients["query"] = _query_gradient(record, per_query_inputs, config)
    if pullback.grad_fields & {"key", "value"}:
        gradients["key"], gradients["value"] = _key_gradients(record, per_query_inputs, config)
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _query_gradient(
    record: TokenSparseAttention, per_query_inputs: PerQueryInputs, config: SparseBackward
) -> jax.Array:
    from ejkernel_triton.token_sparse_attention.kernels.sparse_bwd_dq import sparse_bwd_dq_kernel

    spec, batch = make_spec(record), record.query.shape[0]
    (dquery,) = launch(
        sparse_bwd_dq_kernel,
        (record.query, *key_and_value_inputs(record), record.indices, *per_query_inputs),
        [ShapeDtype(record.query.shape, record.query.dtype)],
        batch=batch,
        grid=cdiv(spec.G, config.heads) * spec.HK * spec.T * batch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec, "HEADS": config.heads, "BLOCK_KV": config.block_kv},
    )
    return dquery


def _key_gradients(
    record: TokenSparseAttention, per_query_inputs: PerQueryInputs, config: SparseBackward
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of key and value, float32; None for a value that is the start of its key."""
    (batch, keys, kv_heads, channels), size = record.key.shape, record.value_size
    widths = (channels,) if value_is_first_tile(record) else (channels, size)
    chunk = queries_per_chunk(record, kv_heads * sum(widths))

    arrays, tokens = (record.query, record.indices, *per_query_inputs), record.query.shape[1]

    def add_chunk_gradients(n: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The last chunk begins earlier instead of being filled up, which would copy all arrays.
        start = jnp.minimum(n * chunk, tokens - chunk)
        query, indices, *rows = (lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in arrays)
        is_new = start + jnp.arange(chunk) >= n * chunk
        part = dataclasses.replace(record, query=query, indices=jnp.where(is_new[:, None, None], indices, -1))
        entry_rows = _entry_gradients(part, (rows[0], rows[1], rows[2]), widths, config)
        order = order_entries_by_key(part.indices, keys)
        return tuple(_add_entries(x, order, y) for x, y in zip(sums, entry_rows, strict=True))

    sums = tuple(jnp.zeros((batch, keys, kv_heads, width), jnp.float32) for width in widths)
    dkey, *rest = lax.fori_loop(0, cdiv(tokens, chunk), add_chunk_gradients, core_compat.as_varying(sums, arrays))
    if record.value is not None:
        return dkey, rest[0]
    return (dkey.at[..., :size].add(rest[0]) if rest else dkey), None


def _entry_gradients(
    record: TokenSparseAttention, per_query_inputs: PerQueryInputs, row_widths: tuple[int, ...], config: SparseBackward
) -> tuple[jax.Array, ...]:
    """Returns what each entry adds to the gradients of its key and value: [B, T, K, Hk, width] of each width."""
    from ejkernel_triton.token_sparse_attention.kernels.sparse_bwd_dkdv import sparse_bwd_dkdv_kernel

    spec, batch = make_spec(record), record.query.shape[0]
    # Without rows of values the kernel writes none, and its output for them is a single element.
    shapes = [(batch, spec.T, spec.K, spec.HK, width) for width in row_widths]
    shapes += [(batch, 1)] * (2 - len(row_widths))
    results = launch(
        sparse_bwd_dkdv_kernel,
        (record.query, *key_and_value_inputs(record), record.indices, *per_query_inputs),
        [ShapeDtype(shape, entry_dtype(record)) for shape in shapes],
        batch=batch,
        grid=cdiv(spec.K, config.key_block_kv) * spec.HK * spec.T * batch,
        num_warps=config.key_warps,
        num_stages=config.key_stages,
        constants={"spec": spec, "HEADS": config.key_heads, "BLOCK_KV": config.key_block_kv},
    )
    return results[: len(row_widths)]


def _add_entries(sums: jax.Array, entry_order: tuple[jax.Array, jax.Array], entry_rows: jax.Array) -> jax.Array:
    """Returns sums [B, S, Hk, width] plus rows of entries, [B, T, K, Hk, width], in the memory of the sums."""
    from ejkernel_triton.token_sparse_attention.kernels.sum_listed_rows import sum_listed_rows_kernel

    entries_by_key, key_bounds = entry_order
    (batch, keys, kv_heads, width), (_, lists, entries) = sums.shape, entries_by_key.shape
    row_width = kv_heads * width // lists
    columns = min(pad_to_power_of_two(row_width), MAX_COLUMNS_PER_SUM)
    (added,) = launch(
        sum_listed_rows_kernel,
        (entry_rows, entries_by_key, key_bounds, sums),
        [3],
        batch=batch,
        grid=cdiv(row_width, columns) * keys * lists * batch,
        num_warps=min(4, max(1, columns // 256)),
        num_stages=2,
        constants={
            "NUM_ENTRIES": entries,
            "NUM_KEYS": keys,
            "NUM_LISTS": lists,
            "WIDTH": row_width,
            "COLUMNS": columns,
        },
    )
    return added
