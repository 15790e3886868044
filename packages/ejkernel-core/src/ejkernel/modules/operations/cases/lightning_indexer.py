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
    ("model's heads", IndexerSizes(t=12, s=48, h=64, d=128), lambda k: {"top_k": 16}, (), ()),
    ("model", IndexerSizes(t=8192, s=8192, h=64, d=128, dtype=jnp.bfloat16), lambda k: {"top_k": 2048}, (), ("bench",)),
    ("small model", IndexerSizes(t=512, s=2048, h=8, d=64), lambda k: {"top_k": 256}, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal numbers, and sequences of about the same length."""
    totals = {"cum_seqlens_q": args.query, "cum_seqlens_k": args.key}

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name not in totals:
            return normal_like(key, shape)
        rows, tokens = totals[name].shape[:2]
        return even_cu_seqlens(rows * tokens, shape)

    return fill_arguments(args, key, make)
