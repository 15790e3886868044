"""Inputs for `lightning_indexer`: the named cases every backend is tested on, and inputs of any given shapes.

Queries, keys and weights of the cases are multiples of 1/4, so that scores are the same in any order of summation, and
many of them are equal: which keys are selected does not depend on rounding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import (
    Row,
    even_cu_seqlens,
    fill_arguments,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class IndexerSizes:
    """Shape of a call: batch, queries, keys, indexer heads, head size; dtype; how far from 0 numbers are."""

    b: int = 1
    t: int = 37
    s: int = 37
    h: int = 4
    d: int = 16
    dtype: Any = jnp.float32
    magnitude: float = 1.0


def make_arrays(key: jax.Array, sizes: IndexerSizes) -> dict[str, Any]:
    """Returns query, key and weights, multiples of 1/4, and a scale that is a power of two."""
    z = sizes
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, z.s, z.d), "weights": (z.b, z.t, z.h)}
    keys = jax.random.split(key, len(shapes))
    fields = {
        n: _rounded_to_quarters(z.magnitude * jax.random.normal(k, x))
        for k, (n, x) in zip(keys, shapes.items(), strict=True)
    }
    dtypes = {"query": z.dtype, "key": z.dtype, "weights": jnp.float32}
    return {**{n: x.astype(dtypes[n]) for n, x in fields.items()}, "softmax_scale": 0.25}


def _rounded_to_quarters(x: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(4 * x), -12, 12) / 4


LONG_CONTEXT_SIZES = IndexerSizes(b=2, t=21, s=70)
PACKED_SIZES = IndexerSizes(t=40, s=61)
PAGED_SIZES = IndexerSizes(b=3, t=2, s=4)
"""Two queries of three requests, over pages of four tokens."""


def _paged_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns pages of keys of 8 bits: three requests, of which two share a page and one lacks one."""
    keys, scales = jax.random.split(key)
    return {
        "key": jax.random.randint(keys, (9, 4, 16), -12, 13).astype(jnp.int8),
        "key_scales": 2.0 ** jax.random.randint(scales, (9, 4), -3, 1),
        "block_tables": jnp.array([[2, 0, 5, 9], [3, 2, -1, 7], [8, 1, 4, 6]]),
        "kv_lens": jnp.array([11, 16, 1]),
        "top_k": 6,
    }


_CASE_TABLE: tuple[Row[IndexerSizes], ...] = (
    ("causal", IndexerSizes(), lambda k: {"top_k": 7}, (), ()),
    (
        "longer context, bfloat16",
        dataclasses.replace(LONG_CONTEXT_SIZES, dtype=jnp.bfloat16),
        lambda k: {"top_k": 9},
        (),
        (),
    ),
    (
        "packed, longer contexts, window",
        PACKED_SIZES,
        lambda k: {
            "top_k": 6,
            "cum_seqlens_q": jnp.array([0, 11, 11, 30, 37], jnp.int32),
            "cum_seqlens_k": jnp.array([0, 25, 29, 50, 53], jnp.int32),
            "sliding_window": (9, 0),
        },
        (),
        ("awkward",),
    ),
    (
        "padded rows, not causal",
        IndexerSizes(b=2, t=19, s=19),
        lambda k: {"top_k": 5, "causal": False, "cum_seqlens_q": jnp.array([0, 13, 32], jnp.int32)},
        (),
        (),
    ),
    ("more than there are", IndexerSizes(t=9, s=9, h=2, d=8), lambda k: {"top_k": 12}, (), ("awkward",)),
    ("equal scores", IndexerSizes(t=33, s=33, h=2, d=4, magnitude=0.2), lambda k: {"top_k": 8}, (), ("awkward",)),
    ("equal keys", LONG_CONTEXT_SIZES, lambda k: {"top_k": 9, "key": jnp.ones((2, 70, 16))}, (), ("awkward",)),
    ("one query", IndexerSizes(b=3, t=1, s=50), lambda k: {"top_k": 4}, (), ("awkward",)),
    ("pages of int8 keys", PAGED_SIZES, _paged_arguments, ("key_scales", "block_tables"), ()),
    (
        "blocks, not rectified",
        IndexerSizes(b=2, t=18, s=33, h=2, d=8),
        lambda k: {"top_k": 4, "block_size": 5, "local_blocks": 1, "rectify": False},
        ("block_size", "rectify"),
        ("awkward",),
    ),
    (
        "blocks of packed sequences",
        PACKED_SIZES,
        lambda k: {
            "top_k": 4,
            "block_size": 4,
            "local_blocks": 1,
            "cum_seqlens_q": jnp.array([0, 11, 11, 30, 37], jnp.int32),
            "cum_seqlens_k": jnp.array([0, 25, 29, 50, 53], jnp.int32),
        },
        (),
        ("awkward",),
    ),
    ("model's heads", IndexerSizes(t=12, s=48, h=64, d=128), lambda k: {"top_k": 16}, (), ()),
    ("model", IndexerSizes(t=8192, s=8192, h=64, d=128, dtype=jnp.bfloat16), lambda k: {"top_k": 2048}, (), ("bench",)),
    ("small model", IndexerSizes(t=512, s=2048, h=8, d=64), lambda k: {"top_k": 256}, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal numbers, sequences of about the same length, and requests
    in successive pages.
    """
    totals, tables = {"cum_seqlens_q": args.query, "cum_seqlens_k": args.key}, args.block_tables
    keys = args.key.shape[1] * (1 if tables is None else tables.shape[1])

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name in totals:
            rows, tokens = totals[name].shape[:2]
            return even_cu_seqlens(rows * tokens, shape)
        if name == "block_tables":
            return (jnp.arange(shape.size).reshape(shape.shape) % max(1, args.key.shape[0])).astype(shape.dtype)
        if name in ("kv_lens", "q_positions"):
            return jnp.full(shape.shape, keys - (name == "q_positions"), shape.dtype)
        if name == "key" and shape.dtype == jnp.int8:
            return jax.random.randint(key, shape.shape, -127, 128).astype(shape.dtype)
        return normal_like(key, shape)

    return fill_arguments(args, key, make)
