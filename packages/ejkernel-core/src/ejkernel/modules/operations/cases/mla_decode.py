"""Inputs for `mla_decode`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import tagged
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Shape of a call: batch, cached tokens, query heads, KV heads, latent size, sizes of key parts and of values.

    `one_cache` puts both caches into one array.
    """

    b: int = 3
    s: int = 63
    h: int = 8
    g: int = 4
    r: int = 24
    n: int = 16
    rope: int = 8
    v: int = 12
    one_cache: bool = False
    dtype: Any = jnp.float32


# name, sizes, lengths, further arguments, optional record fields the case is about, further tags
_Row = tuple[str, DecodeSizes, tuple[int, ...], dict[str, Any], tuple[str, ...], tuple[str, ...]]
_TABLE: tuple[_Row, ...] = (
    (
        "two caches, lse",
        DecodeSizes(),
        (63, 0, 20),
        {"return_lse": True},
        ("q_segment_ids", "kv_segment_ids"),
        ("awkward",),
    ),
    (
        "one cache, window, cap, sinks, lse",
        DecodeSizes(one_cache=True),
        (63, 5, 31),
        {"sliding_window": 9, "logits_soft_cap": 1.5, "softmax_aux": (8, 2), "return_lse": True},
        ("q_positions", "sliding_window", "logits_soft_cap", "softmax_aux"),
        (),
    ),
    ("no rotary part, bfloat16", DecodeSizes(rope=0, one_cache=True, dtype=jnp.bfloat16), (40, 63, 1), {}, (), ()),
    (
        "model",
        DecodeSizes(b=8, s=8192, h=128, g=128, r=512, n=128, rope=64, v=128, one_cache=True, dtype=jnp.bfloat16),
        (8192,) * 8,
        {},
        (),
        ("bench",),
    ),
)


def arrays(key: jax.Array, sizes: DecodeSizes, lengths: tuple[int, ...]) -> dict[str, jax.Array]:
    """Normal arrays, with weights that keep what they project at size 1."""
    z = sizes
    shapes = {
        "query": (z.b, z.h, z.n + z.rope),
        "latent_cache": (z.b, z.s, z.r + (z.rope if z.one_cache else 0)),
        "w_kc": (z.r, z.g, z.n),
        "w_vc": (z.r, z.g, z.v),
    }
    shapes |= {} if z.one_cache else {"rope_cache": (z.b, z.s, z.rope)}
    keys = jax.random.split(key, len(shapes))
    made = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    made = {name: (x * z.r**-0.5 if name[0] == "w" else x).astype(z.dtype) for name, x in made.items()}
    return {**made, "lengths": jnp.array(lengths, jnp.int32)}


def cases(arguments: type) -> tuple[Case, ...]:
    """The named cases as argument records of the given type."""
    return tuple(_case(arguments, *row) for row in _TABLE)


def _case(
    arguments: type,
    name: str,
    sizes: DecodeSizes,
    lengths: tuple[int, ...],
    options: dict[str, Any],
    exercises: tuple[str, ...],
    tags: tuple[str, ...],
) -> Case:
    def make(key: jax.Array) -> Any:
        inputs, sinks = jax.random.split(key)
        given = {n: jax.random.normal(sinks, x) if n == "softmax_aux" else x for n, x in options.items()}
        return arguments(**arrays(inputs, sizes, lengths), **given)

    return tagged(name, make, exercises, tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Concrete arguments of the given shapes, valid as a call: normal floats, full caches.

    Args:
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        key: PRNG key.
    """
    names = [f.name for f in dataclasses.fields(args) if not f.metadata.get("static")]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    made: dict[str, Any] = {}
    for name in names:
        shape = getattr(args, name)
        if shape is None:
            continue
        if name == "lengths":
            made[name] = jnp.full(shape.shape, args.latent_cache.shape[1], shape.dtype)
            continue
        x = jax.random.normal(keys[name], shape.shape, jnp.float32)
        made[name] = (x * shape.shape[0] ** -0.5 if name in ("w_kc", "w_vc") else x).astype(shape.dtype)
    return dataclasses.replace(args, **made)
