"""Inputs for `native_sparse_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
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
class NativeSparseSizes:
    """Shape of a call: batch, tokens, query heads, KV heads, head size, value size, tokens per block; which gates."""

    b: int = 1
    t: int = 40
    h: int = 4
    g: int = 2
    d: int = 16
    v: int = 16
    block_size: int = 8
    gate_names: tuple[str, ...] = ()
    dtype: Any = jnp.float32


def make_arrays(key: jax.Array, sizes: NativeSparseSizes) -> dict[str, Any]:
    """Returns normal query, key and value, gates between 0 and 1, and the size of blocks."""
    z = sizes
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, z.t, z.g, z.d), "value": (z.b, z.t, z.g, z.v)}
    keys = jax.random.split(key, len(shapes) + len(z.gate_names))
    fields = {n: jax.random.normal(k, x).astype(z.dtype) for k, (n, x) in zip(keys, shapes.items(), strict=False)}
    gates = {
        n: jax.random.uniform(k, (z.b, z.t, z.h)).astype(z.dtype) for k, n in zip(keys[3:], z.gate_names, strict=True)
    }
    return {**fields, **gates, "block_size": z.block_size}


def _random_listed_blocks(key: jax.Array, z: NativeSparseSizes, num_slots: int) -> jax.Array:
    """Returns blocks from one before the first to one after the last, some of them twice."""
    return jax.random.randint(key, (z.b, z.t, z.g, num_slots), -1, z.t // z.block_size + 1)


def _packed_sequence_arguments(key: jax.Array, z: NativeSparseSizes) -> dict[str, Any]:
    return {"cu_seqlens": jnp.array([0, 19, 19, 22, 37], jnp.int32), "block_counts": 2, "window_size": 5}


ALL = ("g_cmp", "g_slc", "g_swa")
GATED_SIZES = NativeSparseSizes(gate_names=ALL)
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
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, equally long sequences,
    random indices of blocks up to the query's own, and counts that use every listed block.
    """
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> Any:
    (rows, tokens), size = args.query.shape[:2], args.block_size
    if name == "cu_seqlens":
        return even_cu_seqlens(rows * tokens, shape)
    if name == "block_indices":
        last = (jnp.arange(tokens) // size)[:, None, None]
        return jax.random.randint(key, shape.shape, 0, last + 1).astype(shape.dtype)
    if not hasattr(shape, "shape"):  # one number of blocks for all queries is structure
        return shape
    if name == "block_counts":
        return jnp.full(shape.shape, args.block_indices.shape[3], shape.dtype)
    return normal_like(key, shape)
