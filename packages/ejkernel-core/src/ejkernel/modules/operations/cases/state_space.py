"""Inputs for `state_space_v2`: the named cases every backend is tested on."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import normal, states_in_slots
from ejkernel.modules.operations.cases.tables import ROW_FUNCTIONS_TAG, tagged_case
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class StateSpaceSizes:
    """Shape of a call: rows, tokens, heads, groups, channels per head, channels of the state."""

    b: int = 2
    t: int = 11
    h: int = 4
    g: int = 2
    p: int = 6
    e: int = 8
    dtype: Any = jnp.float32


PACKED_SIZES = StateSpaceSizes(b=1, t=23)

# name, sizes, which optional arrays, static arguments, optional record fields the case is about, further tags
Row = tuple[str, StateSpaceSizes, tuple[str, ...], dict[str, Any], tuple[str, ...], tuple[str, ...]]
_CASE_TABLE: tuple[Row, ...] = (
    ("one group", StateSpaceSizes(g=1), (), {}, ("decay", "dt", "skip"), ()),
    (
        "one token with a state",
        StateSpaceSizes(t=1, p=8),
        ("initial_state",),
        {},
        ("initial_state", "transposed_states"),
        ("awkward",),
    ),
    (
        "grouped, with a state",
        StateSpaceSizes(),
        ("initial_state", "conv_state"),
        {"n_groups": 2},
        ("initial_state",),
        (),
    ),
    (
        "gated",
        StateSpaceSizes(t=7),
        ("gate",),
        {"act_fn": jax.nn.gelu, "precision": "highest"},
        ("decay", "precision"),
        (),
    ),
    ("normalised and gated", StateSpaceSizes(g=4), ("gate",), {"use_gated_rmsnorm": True}, ("decay",), ()),
    (
        "gated, then normalised in groups",
        StateSpaceSizes(t=7),
        ("gate",),
        {"use_gated_rmsnorm": True, "norm_before_gate": False, "norm_group_size": 12},
        ("decay",),
        (),
    ),
    (
        "raw steps",
        StateSpaceSizes(),
        ("dt_bias",),
        {"dt_softplus": True, "dt_limit": (0.3, 1.5), "D": None},
        ("decay", "dt"),
        (),
    ),
    ("packed, states", PACKED_SIZES, ("states", "cu_seqlens"), {}, ("cu_seqlens", "sequence_state"), ("awkward",)),
    (
        "slots",
        StateSpaceSizes(b=1, t=5),
        ("slots", "starts", "state_indices"),
        {},
        ("cu_seqlens", "sequence_state", "state_slots"),
        (),
    ),
    ("trees", StateSpaceSizes(t=5), ("initial_state", "parents"), {}, ("parents", "transposed_states"), ("awkward",)),
    ("bfloat16", StateSpaceSizes(dtype=jnp.bfloat16), ("gate",), {}, ("decay",), ()),
    ("model", StateSpaceSizes(b=1, t=4096, h=24, g=1, p=64, e=128), (), {}, (), ("bench",)),
    ("small model", StateSpaceSizes(b=1, t=512, h=8, g=1, p=64, e=64), (), {}, (), ("bench_cpu",)),
    (
        "raw steps, long norms",
        StateSpaceSizes(b=3, t=9, p=32),
        ("gate", "dt_bias", "initial_state", "conv_state"),
        {"use_gated_rmsnorm": True, "dt_softplus": True},
        (),
        (ROW_FUNCTIONS_TAG,),
    ),
)


_FIELD_OF_ARRAY = {"states": "initial_state", "slots": "initial_state", "starts": "cu_seqlens"}
"""Name of a generated array -> the field that takes it, where that has another name."""


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases(record_type, _CASE_TABLE)


def make_cases(record_type: type, rows: Iterable[Row]) -> tuple[Case, ...]:
    """Returns the rows as cases that make argument records of the given type."""
    return tuple(_make_case(record_type, *row) for row in rows)


def _make_case(
    record_type: type,
    name: str,
    sizes: StateSpaceSizes,
    optional: tuple[str, ...],
    constants: dict[str, Any],
    exercises: tuple[str, ...],
    tags: tuple[str, ...],
) -> Case:
    def make(key: jax.Array) -> Any:
        arrays = _make_arrays(key, sizes)
        required = ("x", "A", "B", "C", "D", "dt")
        fields = {_FIELD_OF_ARRAY.get(name, name): arrays[name] for name in (*required, *optional)}
        return record_type(**fields | constants)

    return tagged_case(name, make, exercises, tags)


def _make_arrays(key: jax.Array, z: StateSpaceSizes) -> dict[str, jax.Array]:
    """Returns every array of a call."""
    keys = iter(jax.random.split(key, 11))
    return {
        "x": normal(next(keys), (z.b, z.t, z.h, z.p), z.dtype),
        "A": -jnp.exp(normal(next(keys), (z.h,))),
        "B": normal(next(keys), (z.b, z.t, z.g, z.e), z.dtype),
        "C": normal(next(keys), (z.b, z.t, z.g, z.e), z.dtype),
        "D": normal(next(keys), (z.h,)),
        "dt": 0.3 * jax.nn.softplus(normal(next(keys), (z.b, z.t, z.h))),
        "gate": normal(next(keys), (z.b, z.t, z.h * z.p), z.dtype),
        "initial_state": normal(next(keys), (z.b, z.h, z.p, z.e)),
        "conv_state": normal(next(keys), (z.b, z.h * z.p, 4), z.dtype),
        "states": normal(next(keys), (4, z.h, z.p, z.e)),
        "cu_seqlens": jnp.array([0, 9, 9, 10, z.t], jnp.int32),
        "slots": states_in_slots(next(keys), (6, z.h, z.p, z.e), (4, 1)),
        "starts": jnp.array([0, 1, 1, 3, 4], jnp.int32),
        "state_indices": jnp.array([4, 2, 1, -1], jnp.int32),
        "parents": jnp.array([[-1, 0, 0, 1, 3], [-1, -1, 1, 0, 2]], jnp.int32),
        "dt_bias": jnp.linspace(-1.0, 1.0, z.h),
    }
