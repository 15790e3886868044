"""Inputs for `mla_decode`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import (
    ROW_FUNCTIONS_TAG,
    Row,
    fill_arguments,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Shape of a call: batch, cached tokens, query heads, KV heads, latent size, sizes of key parts and of values.

    `has_joint_cache` puts both caches into one array; `lengths` are those of its rows.
    """

    b: int = 3
    s: int = 63
    h: int = 8
    g: int = 4
    r: int = 24
    n: int = 16
    rope: int = 8
    v: int = 12
    has_joint_cache: bool = False
    lengths: tuple[int, ...] = (63, 0, 20)
    dtype: Any = jnp.float32


def _windowed_arguments(key: jax.Array) -> dict[str, Any]:
    sinks = jax.random.normal(key, (8, 2))
    return {"sliding_window": 9, "logits_soft_cap": 1.5, "softmax_aux": sinks, "return_lse": True}


_CASE_TABLE: tuple[Row[DecodeSizes], ...] = (
    (
        "two caches, lse",
        DecodeSizes(),
        lambda k: {"return_lse": True},
        ("q_segment_ids", "kv_segment_ids"),
        ("awkward",),
    ),
    (
        "one cache, window, cap, sinks, lse",
        DecodeSizes(has_joint_cache=True, lengths=(63, 5, 31)),
        _windowed_arguments,
        ("q_positions", "sliding_window", "logits_soft_cap", "softmax_aux"),
        (),
    ),
    (
        "no rotary part, bfloat16",
        DecodeSizes(rope=0, has_joint_cache=True, lengths=(40, 63, 1), dtype=jnp.bfloat16),
        lambda k: {},
        (),
        (),
    ),
    (
        "model",
        DecodeSizes(
            8,
            8192,
            128,
            128,
            r=512,
            n=128,
            rope=64,
            v=128,
            has_joint_cache=True,
            lengths=(8192,) * 8,
            dtype=jnp.bfloat16,
        ),
        lambda k: {},
        (),
        ("bench",),
    ),
    (
        "small model",
        DecodeSizes(4, 1024, 16, 16, r=128, n=64, rope=32, v=64, has_joint_cache=True, lengths=(1024,) * 4),
        lambda k: {},
        (),
        ("bench_cpu",),
    ),
    (
        "long heads",
        DecodeSizes(s=40, h=4, g=2, r=64, n=64, rope=16, v=32, lengths=(40, 0, 20)),
        lambda k: {},
        (),
        (ROW_FUNCTIONS_TAG,),
    ),
)


def make_arrays(key: jax.Array, sizes: DecodeSizes) -> dict[str, jax.Array]:
    """Returns normal arrays, with weights that keep what they project at size 1."""
    z = sizes
    shapes = {
        "query": (z.b, z.h, z.n + z.rope),
        "latent_cache": (z.b, z.s, z.r + (z.rope if z.has_joint_cache else 0)),
        "w_kc": (z.r, z.g, z.n),
        "w_vc": (z.r, z.g, z.v),
    }
    shapes |= {} if z.has_joint_cache else {"rope_cache": (z.b, z.s, z.rope)}
    keys = jax.random.split(key, len(shapes))
    fields = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    fields = {name: (x * z.r**-0.5 if name[0] == "w" else x).astype(z.dtype) for name, x in fields.items()}
    return {**fields, "lengths": jnp.array(z.lengths, jnp.int32)}


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, full caches."""
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> jax.Array:
    if name == "lengths":
        return jnp.full(shape.shape, args.latent_cache.shape[1], shape.dtype)
    return normal_like(key, shape, shape.shape[0] ** -0.5 if name in ("w_kc", "w_vc") else 1.0)
