"""Inputs for `token_sparse_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules.operations.cases.tables import Row, fill_arguments, make_cases_of_rows, normal_like
from ejkernel.ops.model import Case
from ejkernel.planning.fp8_latents import pack_fp8_latents


@dataclasses.dataclass(frozen=True)
class TokenSparseSizes:
    """Shape of a call: batch, queries, keys, query heads, KV heads, head size, value size, listed keys; whether values
    are arrays of their own, whether KV heads list keys of their own; dtype.
    """

    b: int = 1
    t: int = 21
    s: int = 40
    h: int = 4
    g: int = 2
    d: int = 24
    v: int = 16
    k: int = 9
    values_in_keys: bool = False
    indices_per_kv_head: bool = False
    dtype: Any = jnp.float32


def make_arrays(key: jax.Array, sizes: TokenSparseSizes) -> dict[str, Any]:
    """Returns normal query, key and value, and indices from one before the first key to one after the last."""
    z = sizes
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, z.s, z.g, z.d), "value": (z.b, z.s, z.g, z.v)}
    keys = jax.random.split(key, 4)
    fields = {n: jax.random.normal(k, x).astype(z.dtype) for k, (n, x) in zip(keys, shapes.items(), strict=False)}
    more: dict[str, Any] = {"value": None, "value_size": z.v, "softmax_scale": 0.2} if z.values_in_keys else {}
    lists = (z.b, z.t, z.g, z.k) if z.indices_per_kv_head else (z.b, z.t, z.k)
    return {**fields, **more, "indices": jax.random.randint(keys[3], lists, -1, z.s + 1)}


GQA_SIZES = TokenSparseSizes()
LATENT_SIZES = TokenSparseSizes(g=1, h=6, values_in_keys=True)
MODEL_SIZES = TokenSparseSizes(
    t=4096, s=32768, h=128, g=1, d=576, v=512, k=2048, values_in_keys=True, dtype=jnp.bfloat16
)
FP8_SIZES = TokenSparseSizes(t=3, h=6, g=1, d=136, v=128, values_in_keys=True)
"""One group of channels with a scale, and a rotary key of 8."""


def _paged_arguments(sizes: TokenSparseSizes) -> Callable[[jax.Array], dict[str, Any]]:
    """Returns the maker of a call of three requests over pages of 4 slots, of which they share one and lack others."""

    def make(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        pages: dict[str, Any] = {
            name: jax.random.normal(k, (11, 4, sizes.g, size))
            for k, name, size in zip(keys[:2], ("key", "value"), (sizes.d, sizes.v), strict=True)
        }
        if sizes.values_in_keys:
            pages = {"key": pack_fp8_latents(pages["key"], sizes.v), "value": None, "key_format": "fp8_latents"}
        return {
            **pages,
            "query": jax.random.normal(keys[2], (3, 3, sizes.h, sizes.d)),
            "indices": jax.random.randint(keys[3], (3, 3, sizes.k), -1, 17),
            "block_tables": jnp.array([[2, 0, 5, 9], [3, 2, -1, 7], [10, 11, 1, 4]]),
            "kv_lens": jnp.array([14, 16, 9]),
            "return_lse": True,
        }

    return make


_CASE_TABLE: tuple[Row[TokenSparseSizes], ...] = (
    ("latent", LATENT_SIZES, lambda k: {}, (), ()),
    (
        "latent, two KV heads, bfloat16",
        TokenSparseSizes(b=2, values_in_keys=True, dtype=jnp.bfloat16),
        lambda k: {},
        (),
        (),
    ),
    ("float16", dataclasses.replace(GQA_SIZES, dtype=jnp.float16), lambda k: {}, ("value",), ()),
    ("grouped heads, lse", GQA_SIZES, lambda k: {"return_lse": True}, ("value",), ()),
    (
        "lists by head, sinks",
        TokenSparseSizes(b=2, t=13, indices_per_kv_head=True),
        lambda k: {"softmax_aux": jax.random.normal(k, (4,)), "return_lse": True},
        ("value", "softmax_aux"),
        ("awkward",),
    ),
    (
        "empty lists",
        LATENT_SIZES,
        lambda k: {"indices": jnp.where(jnp.arange(21)[:, None] % 3 > 0, jnp.arange(9), -1)[None], "return_lse": True},
        (),
        ("awkward",),
    ),
    ("one key, many times", LATENT_SIZES, lambda k: {"indices": jnp.full((1, 21, 9), 3)}, (), ("awkward",)),
    ("more queries than keys", TokenSparseSizes(t=30, s=5), lambda k: {}, ("value",), ("awkward",)),
    ("pages, grouped heads", GQA_SIZES, _paged_arguments(GQA_SIZES), ("value",), ("awkward",)),
    ("pages of fp8 latents", FP8_SIZES, _paged_arguments(FP8_SIZES), ("key_format",), ()),
    ("model", MODEL_SIZES, lambda k: {}, (), ("bench",)),
    ("small model", TokenSparseSizes(t=256, s=1024, h=16, g=1, d=96, v=64, k=128), lambda k: {}, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal numbers, keys at random, requests in successive pages."""
    tables, key_format = (getattr(args, name, None) for name in ("block_tables", "key_format"))
    tokens = args.key.shape[1] * (1 if tables is None else tables.shape[1])

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name == "indices":
            return jax.random.randint(key, shape.shape, 0, max(1, tokens)).astype(shape.dtype)
        if name == "block_tables":
            return (jnp.arange(shape.size).reshape(shape.shape) % max(1, args.key.shape[0])).astype(shape.dtype)
        if name == "kv_lens":
            return jnp.full(shape.shape, tokens, shape.dtype)
        if name == "key" and key_format is not None:
            numbers = jax.random.normal(key, (*shape.shape[:-1], args.query.shape[-1]))
            return lax.bitcast_convert_type(pack_fp8_latents(numbers, args.value_size), shape.dtype)
        return normal_like(key, shape)

    return fill_arguments(args, key, make)
