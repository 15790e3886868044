"""Inputs for `native_sparse_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.cases.tables import (
    Row,
    even_cu_seqlens,
    fill_arguments,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class NativeSparseSizes:
    """Shape of a call: batch, queries, query heads, KV heads, head size, value size, tokens per block; which gates;
    and the number of keys, if it differs from that of queries.
    """

    b: int = 1
    t: int = 40
    h: int = 4
    g: int = 2
    d: int = 16
    v: int = 16
    block_size: int = 8
    gate_names: tuple[str, ...] = ()
    dtype: Any = jnp.float32
    s: int | None = None


def make_arrays(key: jax.Array, sizes: NativeSparseSizes) -> dict[str, Any]:
    """Returns normal query, key and value, gates between 0 and 1, and the size of blocks."""
    z = sizes
    keys = z.t if z.s is None else z.s
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, keys, z.g, z.d), "value": (z.b, keys, z.g, z.v)}
    seeds = jax.random.split(key, len(shapes) + len(z.gate_names))
    fields = {n: jax.random.normal(k, x).astype(z.dtype) for k, (n, x) in zip(seeds, shapes.items(), strict=False)}
    gates = {
        n: jax.random.uniform(k, (z.b, z.t, z.h)).astype(z.dtype) for k, n in zip(seeds[3:], z.gate_names, strict=True)
    }
    return {**fields, **gates, "block_size": z.block_size}


def _random_listed_blocks(key: jax.Array, z: NativeSparseSizes, num_slots: int) -> jax.Array:
    """Returns blocks from one before the first to one after the last, some of them twice."""
    return jax.random.randint(key, (z.b, z.t, z.g, num_slots), -1, z.t // z.block_size + 1)


def _packed_sequence_arguments(key: jax.Array, z: NativeSparseSizes) -> dict[str, Any]:
    return {"cu_seqlens": jnp.array([0, 19, 19, 22, 37], jnp.int32), "block_counts": 2, "window_size": 5}


def _longer_context_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns packed sequences with more keys than queries, with no queries, and with fewer keys than queries."""
    return {
        "cu_seqlens": jnp.array([0, 9, 9, 15, 20], jnp.int32),
        "cu_seqlens_k": jnp.array([0, 21, 24, 40, 43], jnp.int32),
        "block_counts": 2,
        "window_size": 5,
    }


def _decode_arguments(key: jax.Array, z: NativeSparseSizes) -> dict[str, Any]:
    """Returns the lengths of two requests in a cache, with compressed keys and values."""
    one, other = jax.random.split(key)
    blocks = (z.b, cdiv(z.s or z.t, z.block_size), z.g)
    return {
        "kv_lens": jnp.array([61, 17], jnp.int32),
        "compressed_key": jax.random.normal(one, (*blocks, z.d)).astype(z.dtype),
        "compressed_value": jax.random.normal(other, (*blocks, z.v)).astype(z.dtype),
        "block_counts": 2,
        "window_size": 11,
    }


def _paged_arguments(key: jax.Array, z: NativeSparseSizes) -> dict[str, Any]:
    """Returns a paged cache of two requests, one of which lacks a page."""
    keys = jax.random.split(key, 4)
    shapes = {"key": (16, z.g, z.d), "value": (16, z.g, z.v)}
    shapes |= {"compressed_key": (2, z.g, z.d), "compressed_value": (2, z.g, z.v)}
    pages = {n: jax.random.normal(k, (9, *x)).astype(z.dtype) for k, (n, x) in zip(keys, shapes.items(), strict=True)}
    return {
        **pages,
        "block_tables": jnp.array([[2, 0, 5, 9], [3, 1, -1, 7]], jnp.int32),
        "kv_lens": jnp.array([43, 57], jnp.int32),
        "cu_seqlens": jnp.array([0, 1, 3], jnp.int32),
        "block_counts": 3,
        "window_size": 21,
    }


ALL = ("g_cmp", "g_slc", "g_swa")
GATED_SIZES = NativeSparseSizes(gate_names=ALL)
LONGER_CONTEXT_SIZES = NativeSparseSizes(t=22, s=50, gate_names=ALL)
DECODE_SIZES = NativeSparseSizes(b=2, t=2, s=64, gate_names=ALL)
SHARED_KV_HEAD_SIZES = NativeSparseSizes(b=2, t=33, h=4, g=1, v=12, gate_names=("g_slc",))

_CASE_TABLE: tuple[Row[NativeSparseSizes], ...] = (
    ("one token", NativeSparseSizes(t=1), lambda k: {"block_indices": jnp.zeros((1, 1, 2, 1), int)}, (), ("awkward",)),
    (
        "all branches",
        GATED_SIZES,
        lambda k: {"block_counts": 3, "window_size": 11},
        ("compressed_key", "compressed_value", *ALL, "window_size", "selected_blocks"),
        (),
    ),
    (
        "given blocks, counted",
        SHARED_KV_HEAD_SIZES,
        lambda k: {
            "block_indices": _random_listed_blocks(k, SHARED_KV_HEAD_SIZES, 4),
            "block_counts": jax.random.randint(
                k, (SHARED_KV_HEAD_SIZES.b, SHARED_KV_HEAD_SIZES.t, SHARED_KV_HEAD_SIZES.g), 0, 5
            ),
        },
        ("g_slc",),
        ("awkward",),
    ),
    (
        "packed",
        GATED_SIZES,
        lambda k: _packed_sequence_arguments(k, GATED_SIZES),
        ("block_starts", "compressed_segment_ids", "q_segment_ids", "kv_segment_ids"),
        (),
    ),
    (
        "padded rows, bfloat16",
        NativeSparseSizes(b=2, gate_names=("g_cmp",), dtype=jnp.bfloat16),
        lambda k: {"cu_seqlens": jnp.array([0, 0, 29], jnp.int32), "softmax_scale": 0.3},
        (),
        (),
    ),
    (
        "packed, longer contexts",
        LONGER_CONTEXT_SIZES,
        _longer_context_arguments,
        ("q_positions", "block_starts", "compressed_segment_ids"),
        ("awkward",),
    ),
    ("decode", DECODE_SIZES, lambda k: _decode_arguments(k, DECODE_SIZES), ("q_positions", "kv_segment_ids"), ()),
    ("decode over pages", DECODE_SIZES, lambda k: _paged_arguments(k, DECODE_SIZES), ("block_tables",), ("awkward",)),
    (
        "model",
        NativeSparseSizes(t=8192, h=64, g=4, d=128, v=128, block_size=64, gate_names=ALL, dtype=jnp.bfloat16),
        lambda k: {},
        (),
        ("bench",),
    ),
    (
        "small model",
        NativeSparseSizes(t=512, h=16, g=1, d=64, v=64, block_size=32, gate_names=ALL),
        lambda k: {},
        (),
        ("bench_cpu",),
    ),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, equally long sequences, requests
    in successive pages, random indices of blocks up to the query's own, and counts that use every listed block.
    """
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> Any:
    (rows, tokens), size, tables = args.query.shape[:2], args.block_size, args.block_tables
    keys = args.key.shape[1] * (1 if tables is None else tables.shape[1])
    if name in ("cu_seqlens", "cu_seqlens_k"):
        return even_cu_seqlens(rows * (tokens if name == "cu_seqlens" else keys), shape)
    if name == "kv_lens":
        return jnp.full(shape.shape, keys, shape.dtype)
    if name == "block_tables":
        return (jnp.arange(shape.size).reshape(shape.shape) % max(1, args.key.shape[0])).astype(shape.dtype)
    if name == "block_indices":
        last = (jnp.maximum(jnp.arange(tokens) + keys - tokens, 0) // size)[:, None, None]
        return jax.random.randint(key, shape.shape, 0, last + 1).astype(shape.dtype)
    if not hasattr(shape, "shape"):  # one number of blocks for all queries is structure
        return shape
    if name == "block_counts":
        return jnp.full(shape.shape, args.block_indices.shape[3], shape.dtype)
    return normal_like(key, shape)
