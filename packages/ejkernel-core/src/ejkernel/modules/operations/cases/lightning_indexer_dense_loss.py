"""Inputs for `lightning_indexer_dense_loss`: the named cases every backend is tested on, and inputs of given shapes."""

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
class DenseLossSizes:
    """Shape of a call: batch, queries, keys, query heads, KV heads, head size, indexer heads, their size; dtype."""

    b: int = 1
    t: int = 21
    s: int = 40
    h: int = 4
    g: int = 2
    d: int = 24
    j: int = 3
    e: int = 16
    dtype: Any = jnp.float32


def make_arrays(key: jax.Array, sizes: DenseLossSizes) -> dict[str, Any]:
    """Returns normal arrays of a call; the weights of the indexer's heads are float32."""
    z = sizes
    shapes = {
        "query": (z.b, z.t, z.h, z.d),
        "key": (z.b, z.s, z.g, z.d),
        "query_index": (z.b, z.t, z.j, z.e),
        "key_index": (z.b, z.s, z.e),
    }
    keys = jax.random.split(key, 5)
    fields = {n: jax.random.normal(k, x).astype(z.dtype) for k, (n, x) in zip(keys[:4], shapes.items(), strict=True)}
    return {**fields, "index_weights": jax.random.normal(keys[4], (z.b, z.t, z.j))}


_CASE_TABLE: tuple[Row[DenseLossSizes], ...] = (
    ("longer context", DenseLossSizes(b=2), lambda k: {}, (), ()),
    (
        "packed, window",
        DenseLossSizes(t=30, s=35, h=6, g=1),
        lambda k: {
            "cum_seqlens_q": jnp.array([0, 9, 9, 26], jnp.int32),
            "cum_seqlens_k": jnp.array([0, 12, 14, 31], jnp.int32),
            "sliding_window": (7, 0),
        },
        (),
        ("awkward",),
    ),
    (
        "padded rows, bfloat16, not causal",
        DenseLossSizes(b=2, t=13, s=13, dtype=jnp.bfloat16),
        lambda k: {"causal": False, "cum_seqlens_q": jnp.array([0, 13, 20], jnp.int32)},
        (),
        (),
    ),
    (
        "model",
        DenseLossSizes(t=4096, s=4096, h=128, g=1, d=576, j=64, e=128, dtype=jnp.bfloat16),
        lambda k: {},
        (),
        ("bench",),
    ),
    ("small model", DenseLossSizes(t=256, s=512, h=16, g=1, d=96, j=8, e=64), lambda k: {}, (), ("bench_cpu",)),
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
