"""Inputs for `native_sparse_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import tagged
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class NativeSparseSizes:
    """Shape of a call: batch, tokens, query heads, KV heads, head size, value size, tokens a block."""

    b: int = 1
    t: int = 40
    h: int = 4
    g: int = 2
    d: int = 16
    v: int = 16
    block: int = 8
    dtype: Any = jnp.float32


def arrays(key: jax.Array, sizes: NativeSparseSizes, gates: tuple[str, ...] = ()) -> dict[str, Any]:
    """Normal query, key and value, gates between 0 and 1, and the size of blocks."""
    z = sizes
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, z.t, z.g, z.d), "value": (z.b, z.t, z.g, z.v)}
    keys = jax.random.split(key, len(shapes) + len(gates))
    made = {n: jax.random.normal(k, x).astype(z.dtype) for k, (n, x) in zip(keys, shapes.items(), strict=False)}
    given = {n: jax.random.uniform(k, (z.b, z.t, z.h)).astype(z.dtype) for k, n in zip(keys[3:], gates, strict=True)}
    return {**made, **given, "block_size": z.block}


def _listed(key: jax.Array, z: NativeSparseSizes, slots: int) -> jax.Array:
    """Blocks from one before the first to one behind the last, some of them twice."""
    return jax.random.randint(key, (z.b, z.t, z.g, slots), -1, z.t // z.block + 1)


def _packed(key: jax.Array, z: NativeSparseSizes) -> dict[str, Any]:
    return {"cu_seqlens": jnp.array([0, 19, 19, 22, 37], jnp.int32), "block_counts": 2, "window_size": 5}


ALL = ("g_cmp", "g_slc", "g_swa")
PLAIN = NativeSparseSizes()
WIDE = NativeSparseSizes(b=2, t=33, h=4, g=1, v=12)

# name, sizes, gates, further arguments from a key, optional record fields the case is about, further tags
_Row = tuple[
    str, NativeSparseSizes, tuple[str, ...], Callable[[jax.Array], dict[str, Any]], tuple[str, ...], tuple[str, ...]
]
_TABLE: tuple[_Row, ...] = (
    (
        "one token",
        NativeSparseSizes(t=1),
        (),
        lambda k: {"block_indices": jnp.zeros((1, 1, 2, 1), int)},
        (),
        ("awkward",),
    ),
    (
        "all branches",
        PLAIN,
        ALL,
        lambda k: {"block_counts": 3, "window_size": 11},
        ("compressed_key", "compressed_value", *ALL, "window_size", "selected_blocks"),
        (),
    ),
    (
        "given blocks, counted",
        WIDE,
        ("g_slc",),
        lambda k: {
            "block_indices": _listed(k, WIDE, 4),
            "block_counts": jax.random.randint(k, (WIDE.b, WIDE.t, WIDE.g), 0, 5),
        },
        ("g_slc",),
        ("awkward",),
    ),
    (
        "packed",
        PLAIN,
        ALL,
        lambda k: _packed(k, PLAIN),
        ("block_starts", "compressed_segment_ids", "q_segment_ids", "kv_segment_ids"),
        (),
    ),
    (
        "padded rows, bfloat16",
        NativeSparseSizes(b=2, dtype=jnp.bfloat16),
        ("g_cmp",),
        lambda k: {"cu_seqlens": jnp.array([0, 0, 29], jnp.int32), "softmax_scale": 0.3},
        (),
        (),
    ),
    (
        "model",
        NativeSparseSizes(t=8192, h=64, g=4, d=128, v=128, block=64, dtype=jnp.bfloat16),
        ALL,
        lambda k: {},
        (),
        ("bench",),
    ),
)


def cases(arguments: type) -> tuple[Case, ...]:
    """The named cases as argument records of the given type."""
    return tuple(_case(arguments, *row) for row in _TABLE)


def _case(
    arguments: type,
    name: str,
    sizes: NativeSparseSizes,
    gates: tuple[str, ...],
    extra: Callable[[jax.Array], dict[str, Any]],
    exercises: tuple[str, ...],
    tags: tuple[str, ...],
) -> Case:
    def make(key: jax.Array) -> Any:
        inputs, options = jax.random.split(key)
        return arguments(**arrays(inputs, sizes, gates), **extra(options))

    return tagged(name, make, exercises, tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Concrete arguments of the given shapes, valid as a call: normal floats, even lengths, any blocks, all of them.

    Args:
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        key: PRNG key.
    """
    names = [f.name for f in dataclasses.fields(args) if not f.metadata.get("static")]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    made = {
        name: _make(name, getattr(args, name), keys[name], args)
        for name in names
        if hasattr(getattr(args, name), "shape")
    }
    return dataclasses.replace(args, **made)


def _make(name: str, shape: Any, key: jax.Array, args: Any) -> Any:
    (rows, tokens), size = args.query.shape[:2], args.block_size
    if name == "cu_seqlens":
        return jnp.linspace(0, rows * tokens, shape.shape[0]).astype(shape.dtype)
    if name == "block_indices":
        last = (jnp.arange(tokens) // size)[:, None, None]
        return jax.random.randint(key, shape.shape, 0, last + 1).astype(shape.dtype)
    if name == "block_counts":
        return jnp.full(shape.shape, args.block_indices.shape[3], shape.dtype)
    return jax.random.normal(key, shape.shape, jnp.float32).astype(shape.dtype)
