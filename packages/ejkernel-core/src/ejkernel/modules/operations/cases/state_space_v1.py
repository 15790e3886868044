"""Inputs for `state_space_v1`: the named cases every backend is tested on, and inputs of any given shapes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import states_in_slots
from ejkernel.modules.operations.cases.tables import ROW_FUNCTIONS_TAG, even_cu_seqlens, fill_arguments, tagged_case
from ejkernel.ops.model import Case

# name, (rows, tokens, channels, numbers per state), optional arguments, dtype, record fields it is about, further tags
Row = tuple[str, tuple[int, int, int, int], tuple[str, ...], Any, tuple[str, ...], tuple[str, ...]]
_CASE_TABLE: tuple[Row, ...] = (
    ("plain", (2, 63, 24, 16), (), jnp.float32, (), ()),
    ("one token", (1, 1, 8, 4), ("initial_state",), jnp.float32, ("initial_state",), ("awkward",)),
    ("three intervals", (1, 129, 20, 5), ("initial_state",), jnp.float32, ("initial_state",), ()),
    ("gate", (2, 64, 16, 8), ("gate", "conv_state"), jnp.float32, (), ()),
    ("other activation", (2, 63, 16, 8), ("gate", "act_fn"), jnp.float32, (), ("awkward",)),
    ("raw steps", (2, 63, 16, 8), ("dt_bias",), jnp.float32, (), ()),
    ("one number a state", (3, 65, 12, 1), (), jnp.float32, (), ("awkward",)),
    ("packed, states", (1, 23, 8, 3), ("states", "cu_seqlens"), jnp.float32, ("cu_seqlens",), ("awkward",)),
    ("slots", (1, 5, 8, 3), ("slots",), jnp.float32, ("cu_seqlens", "state_slots"), ()),
    ("bfloat16", (2, 129, 32, 16), ("gate",), jnp.bfloat16, (), ()),
    ("model", (1, 2048, 4096, 16), ("gate",), jnp.bfloat16, (), ("bench",)),
    ("small model", (1, 256, 512, 16), ("gate",), jnp.float32, (), ("bench_cpu",)),
    (
        "raw steps, gated",
        (3, 17, 24, 8),
        ("gate", "dt_bias", "initial_state", "conv_state"),
        jnp.float32,
        (),
        (ROW_FUNCTIONS_TAG,),
    ),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases(record_type, _CASE_TABLE)


def make_cases(record_type: type, rows: Iterable[Row]) -> tuple[Case, ...]:
    """Returns the rows as cases that make argument records of the given type."""
    return tuple(_make_case(record_type, row) for row in rows)


def _make_case(record_type: type, row: Row) -> Case:
    name, (rows, tokens, channels, size), optional, dtype, exercises, tags = row
    shapes = {
        "hidden_states": (rows, tokens, channels),
        "A": (channels, size),
        "B": (rows, tokens, size),
        "C": (rows, tokens, size),
        "D": (channels,),
        "dt": (rows, tokens, channels),
        "gate": (rows, tokens, channels),
        "initial_state": (rows, channels, size),
        "conv_state": (rows, channels, 4),
        "states": (4, channels, size),
    }
    required = ("hidden_states", "A", "B", "C", "D", "dt")

    def make(key: jax.Array) -> Any:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        used = {field: shape for field, shape in shapes.items() if field in required or field in optional}
        fields: dict[str, Any] = {
            field: _normal_array(field, shape, keys[field]).astype(dtype) for field, shape in used.items()
        }
        if "states" in fields:
            fields["initial_state"] = fields.pop("states")
            fields["cu_seqlens"] = jnp.array([0, 9, 9, 10, tokens], jnp.int32)
        if "slots" in optional:
            fields["initial_state"] = states_in_slots(key, (6, channels, size), (4, 1), dtype)
            fields["cu_seqlens"] = jnp.array([0, 1, 1, 3, 4], jnp.int32)
            fields["state_indices"] = jnp.array([4, 2, 1, -1], jnp.int32)
        if "dt_bias" in optional:
            fields |= {"dt_bias": jnp.linspace(-1.0, 1.0, channels), "D": None}
            fields |= {"dt": fields["dt"] - 1, "dt_softplus": True, "dt_limit": (0.3, 1.5)}
        return record_type(**fields, act_fn=jax.nn.sigmoid if "act_fn" in optional else None)

    return tagged_case(name, make, exercises, tags)


def _normal_array(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Returns normal numbers, as a model would have them: negative A, positive and small dt."""
    x = jax.random.normal(key, shape, jnp.float32)
    return -jnp.exp(x / 2) if name == "A" else jax.nn.softplus(x - 1) if name == "dt" else x


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, negative A, positive dt."""

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name == "cu_seqlens":
            return even_cu_seqlens(args.hidden_states.shape[1], shape)
        if name == "state_indices":
            return jnp.arange(shape.shape[0], dtype=shape.dtype)
        return _normal_array(name, shape.shape, key).astype(shape.dtype)

    return fill_arguments(args, key, make)
