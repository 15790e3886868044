"""Inputs for `rwkv4`: the named cases."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import tagged_case
from ejkernel.ops.model import Case

_STATE_FIELDS = ("initial_state",)
_CASE_TABLE: tuple[tuple[str, tuple[int, int, int], Any, float, tuple[str, ...], tuple[str, ...]], ...] = (
    ("rows", (2, 11, 8), jnp.float32, 1.0, (), ()),
    ("state", (2, 7, 12), jnp.float32, 1.0, _STATE_FIELDS, ()),
    ("one token with a state", (3, 1, 5), jnp.float32, 1.0, _STATE_FIELDS, ("awkward",)),
    ("large keys", (1, 9, 8), jnp.float32, 100.0, (), ("awkward",)),
    ("bfloat16", (2, 11, 16), jnp.bfloat16, 1.0, _STATE_FIELDS, ()),
    ("model", (8, 1024, 2048), jnp.float32, 1.0, (), ("bench",)),
    ("small model", (2, 256, 512), jnp.float32, 1.0, (), ("bench_cpu",)),
)
"""Name, rows, tokens and channels, dtype, size of the keys, fields the case is about, further tags."""


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the cases of `rwkv4`."""
    return tuple(_make_case(record_type, *row) for row in _CASE_TABLE)


def _make_case(
    record_type: type,
    name: str,
    sizes: tuple[int, int, int],
    dtype: Any,
    key_magnitude: float,
    exercises: Any,
    tags: Any,
) -> Case:
    rows, _, channels = sizes

    def make(key: jax.Array) -> Any:
        w, u, k, v, sums, largest = jax.random.split(key, 6)
        arrays: dict[str, Any] = {
            "w": jax.random.normal(w, (channels,)),
            "u": jax.random.normal(u, (channels,)),
            "k": (key_magnitude * jax.random.normal(k, sizes)).astype(dtype),
            "v": jax.random.normal(v, sizes).astype(dtype),
        }
        if exercises:
            first = jax.random.uniform(sums, (rows, 2, channels), minval=0.5)
            arrays["state"] = jnp.concatenate([first, jax.random.normal(largest, (rows, 1, channels))], axis=1)
        return record_type(**arrays, return_state=bool(exercises))

    return tagged_case(name, make, exercises, tags)
