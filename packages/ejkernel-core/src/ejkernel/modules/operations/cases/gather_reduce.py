"""Inputs for `gather_reduce`: the named cases every backend is tested on, and inputs of any given shapes."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import normal_like, tagged_case
from ejkernel.ops.model import Case

# name, rows, tokens, indices a token, pairs a row, channels, dtypes of rows and weights, whether some name none, tags
_Row = tuple[str, int, int, int, int, int, Any, Any, bool, tuple[str, ...]]
_CASE_TABLE: tuple[_Row, ...] = (
    ("dispatch", 24, 72, 1, 3, 60, jnp.float32, None, False, ()),
    ("combine", 72, 24, 3, 1, 60, jnp.float32, jnp.float32, False, ()),
    ("dropped", 40, 24, 3, 2, 33, jnp.float32, jnp.float32, True, ("awkward",)),
    ("one token", 1, 1, 1, 1, 1, jnp.float32, jnp.float32, False, ("awkward",)),
    ("many pairs a row", 5, 60, 2, 40, 16, jnp.float32, None, True, ("awkward",)),
    ("bfloat16", 96, 24, 4, 1, 128, jnp.bfloat16, jnp.float32, False, ()),
    ("bfloat16 weights", 64, 40, 2, 4, 130, jnp.bfloat16, jnp.bfloat16, True, ()),
    ("experts, dispatch", 8192, 65536, 1, 8, 2048, jnp.bfloat16, None, False, ("bench",)),
    ("experts, combine", 65536, 8192, 8, 1, 2048, jnp.bfloat16, jnp.float32, False, ("bench",)),
    ("small experts, dispatch", 1024, 8192, 1, 8, 256, jnp.float32, None, False, ("bench_cpu",)),
    ("small experts, combine", 8192, 1024, 8, 1, 256, jnp.float32, jnp.float32, False, ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return tuple(_make_case(record_type, row) for row in _CASE_TABLE)


def _make_case(record_type: type, row: _Row) -> Case:
    name, rows, tokens, count, most, channels, dtype, weight_dtype, drops, tags = row

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        indices, inverse = random_index_pairs(keys[0], rows, tokens, count, most, drop_pairs=drops)
        weights = None if weight_dtype is None else jax.random.normal(keys[1], (tokens, count)).astype(weight_dtype)
        x = jax.random.normal(keys[2], (rows, channels)).astype(dtype)
        return record_type(rows=x, indices=indices, inverse=inverse, weights=weights)

    return tagged_case(name, make, () if weight_dtype is None else ("weights",), tags)


def random_index_pairs(
    key: jax.Array,
    num_rows: int,
    num_tokens: int,
    rows_per_token: int,
    max_pairs_per_row: int,
    *,
    drop_pairs: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns random row indices [num_tokens, rows_per_token], and their inverse [num_rows, max_pairs_per_row].

    The inverse lists the (token, index) pairs that name each row, in random slots. With `drop_pairs`, a third of the
    pairs that fit are left out.
    """
    pairs, slots = num_tokens * rows_per_token, num_rows * max_pairs_per_row
    used = min(pairs, slots)
    used -= used // 3 if drop_pairs else 0
    pair_key, slot_key = jax.random.split(key)
    pair = jax.random.permutation(pair_key, pairs)[:used]
    slot = jax.random.permutation(slot_key, slots)[:used]
    indices = jnp.full(pairs, -1, jnp.int32).at[pair].set((slot // max_pairs_per_row).astype(jnp.int32))
    inverse = jnp.full(slots, pairs, jnp.int32).at[slot].set(pair.astype(jnp.int32))
    return indices.reshape(num_tokens, rows_per_token), inverse.reshape(num_rows, max_pairs_per_row)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, as many pairs as both arrays
    hold.
    """
    keys = jax.random.split(key, 3)
    (tokens, count), (rows, most) = args.indices.shape, args.inverse.shape
    indices, inverse = random_index_pairs(keys[0], rows, tokens, count, most)
    factor = 1 / math.sqrt(count)
    return type(args)(
        rows=normal_like(keys[1], args.rows),
        indices=indices.astype(args.indices.dtype),
        inverse=inverse.astype(args.inverse.dtype),
        weights=None if args.weights is None else normal_like(keys[2], args.weights, factor),
    )
