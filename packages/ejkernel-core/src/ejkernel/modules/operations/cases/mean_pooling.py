"""Inputs for `mean_pooling`: the named cases every backend is tested on, and inputs of any given shapes."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import even_cu_seqlens, fill_arguments, normal_like, tagged_case
from ejkernel.ops.model import Case

# name, shape of x, cumulative lengths, chunk size, dtype, optional record fields the case is about, further tags
_Row = tuple[str, tuple[int, ...], tuple[int, ...] | None, int | None, Any, tuple[str, ...], tuple[str, ...]]
_CASE_TABLE: tuple[_Row, ...] = (
    ("rows", (2, 63, 60), None, None, jnp.float32, (), ()),
    ("chunks of heads", (2, 63, 4, 32), None, None, jnp.float32, (), ()),
    ("one token", (1, 1, 2, 16), None, 8, jnp.float32, (), ("awkward",)),
    ("packed", (129, 60), (0, 40, 40, 100, 120), None, jnp.float32, ("ranges",), ("awkward",)),
    ("packed, chunks", (1, 129, 2, 30), (0, 1, 1, 34, 129), 16, jnp.float32, ("ranges",), ()),
    ("padded rows", (2, 63, 20), (0, 50, 63), None, jnp.float32, ("lengths",), ()),
    ("padded rows, chunks", (2, 63, 20), (0, 0, 63), 10, jnp.float32, ("lengths",), ("awkward",)),
    ("bfloat16", (2, 129, 64), None, None, jnp.bfloat16, (), ()),
    ("documents", (65536, 2048), tuple(range(0, 65537, 1024)), None, jnp.bfloat16, ("ranges",), ("bench",)),
    ("small documents", (8192, 256), tuple(range(0, 8193, 512)), None, jnp.float32, ("ranges",), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return tuple(_make_case(record_type, row) for row in _CASE_TABLE)


def _make_case(record_type: type, row: _Row) -> Case:
    name, shape, lengths, chunk_size, dtype, exercises, tags = row

    def make(key: jax.Array) -> Any:
        x = jax.random.normal(key, shape, jnp.float32).astype(dtype)
        cu_seqlens = None if lengths is None else jnp.array(lengths, jnp.int32)
        return record_type(x=x, cu_seqlens=cu_seqlens, chunk_size=chunk_size)

    return tagged_case(name, make, exercises, tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, sequences of even lengths."""
    rows = args.x.shape[:1] if len(args.x.shape) == 2 else args.x.shape[:2]

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        return even_cu_seqlens(math.prod(rows), shape) if name == "cu_seqlens" else normal_like(key, shape)

    return fill_arguments(args, key, make)
