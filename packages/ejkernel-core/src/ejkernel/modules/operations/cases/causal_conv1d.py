"""Inputs for `causal_conv1d`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import even_cu_seqlens, fill_arguments, normal_like, tagged_case
from ejkernel.ops.model import Case

CU_SEQLENS = (0, 1, 1, 30, 33, 60)
"""Cumulative lengths of a packed case: one token, none, fewer than a state has, and padding tokens after."""

# name, (rows, tokens, channels, width), optional arrays, further arguments, dtype, record fields it is about, tags
_Row = tuple[str, tuple[int, int, int, int], tuple[str, ...], dict[str, Any], Any, tuple[str, ...], tuple[str, ...]]
_SILU_ARGUMENTS = {"activation": "silu"}
_RETURN_STATE_ARGUMENTS = {"return_state": True}
_CASE_TABLE: tuple[_Row, ...] = (
    ("plain", (2, 63, 20, 4), (), {}, jnp.float32, (), ()),
    ("layer", (2, 65, 24, 4), ("bias",), _SILU_ARGUMENTS, jnp.float32, ("bias", "activation"), ()),
    (
        "two weights",
        (1, 33, 60, 2),
        ("bias", "initial_state"),
        _RETURN_STATE_ARGUMENTS,
        jnp.float32,
        ("initial_state",),
        (),
    ),
    (
        "eight weights",
        (2, 35, 8, 8),
        ("initial_state",),
        _SILU_ARGUMENTS | _RETURN_STATE_ARGUMENTS,
        jnp.float32,
        ("initial_state",),
        ("awkward",),
    ),
    (
        "decode",
        (3, 1, 20, 4),
        ("bias", "initial_state"),
        _SILU_ARGUMENTS | _RETURN_STATE_ARGUMENTS,
        jnp.float32,
        ("initial_state",),
        (),
    ),
    (
        "packed",
        (1, 63, 20, 4),
        ("cu_seqlens", "bias"),
        _SILU_ARGUMENTS,
        jnp.float32,
        ("cu_seqlens", "bias"),
        ("awkward",),
    ),
    (
        "packed with states",
        (1, 63, 20, 5),
        ("cu_seqlens", "initial_state"),
        _SILU_ARGUMENTS | _RETURN_STATE_ARGUMENTS,
        jnp.float32,
        ("cu_seqlens", "sequence_state"),
        ("awkward",),
    ),
    ("bfloat16", (2, 65, 40, 4), ("bias",), _SILU_ARGUMENTS | _RETURN_STATE_ARGUMENTS, jnp.bfloat16, ("bias",), ()),
    ("model", (8, 4096, 4096, 4), ("bias",), _SILU_ARGUMENTS, jnp.bfloat16, (), ("bench",)),
    ("small model", (2, 1024, 512, 4), ("bias",), _SILU_ARGUMENTS, jnp.float32, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    in_slots = (_slotted_states_case(record_type, *kind) for kind in ((False, 4), (True, 4), (True, 3)))
    return (*(_make_case(record_type, row) for row in _CASE_TABLE), *in_slots, _draft_tree_case(record_type))


def _draft_tree_case(record_type: type) -> Case:
    """Returns a case of three trees of draft tokens, one of them empty, whose states are in slots, and padding."""

    def make(key: jax.Array) -> Any:
        shapes = {"x": (1, 9, 12), "weight": (12, 4), "bias": (12,), "initial_state": (5, 12, 3)}
        keys = jax.random.split(key, len(shapes))
        arrays = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        bounds, indices = jnp.array([0, 5, 5, 8], jnp.int32), jnp.array([3, 0, -1], jnp.int32)
        parents = jnp.array([[-1, 0, 0, 1, 3, -1, -1, 1, 0]], jnp.int32)
        fields = {"cu_seqlens": bounds, "state_indices": indices, "parents": parents}
        return record_type(**arrays, **fields, **_SILU_ARGUMENTS, **_RETURN_STATE_ARGUMENTS)

    return tagged_case("packed trees of draft tokens", make, ("bias", "initial_state"), ("awkward",))


def _slotted_states_case(record_type: type, is_packed: bool, tokens_per_state: int) -> Case:
    """Returns a case whose states, of W = 4 tokens or of W - 1, lie in slots; one row or sequence has none."""
    rows, tokens, sequences = (1, 63, len(CU_SEQLENS) - 1) if is_packed else (3, 1, 3)

    def make(key: jax.Array) -> Any:
        shapes = {"x": (rows, tokens, 20), "weight": (20, 4), "bias": (20,), "initial_state": (7, 20, tokens_per_state)}
        keys = jax.random.split(key, len(shapes))
        arrays = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        bounds = {"cu_seqlens": jnp.array(CU_SEQLENS, jnp.int32)} if is_packed else {}
        indices = jnp.array([5, -1, 2, 0, 6][:sequences], jnp.int32)
        return record_type(**arrays, **bounds, state_indices=indices, **_SILU_ARGUMENTS, **_RETURN_STATE_ARGUMENTS)

    if tokens_per_state == 3:
        return tagged_case(
            "packed, states of W - 1 tokens in slots", make, ("sequence_state", "state_slots"), ("awkward",)
        )
    name, field = ("packed, states in slots", "sequence_state") if is_packed else ("decode in slots", "initial_state")
    return tagged_case(name, make, (field,), ())


def _make_case(record_type: type, row: _Row) -> Case:
    name, (rows, tokens, channels, width), optional, further_fields, dtype, exercises, tags = row
    sequences = len(CU_SEQLENS) - 1 if "cu_seqlens" in optional else rows
    shapes = {
        "x": (rows, tokens, channels),
        "weight": (channels, width),
        "bias": (channels,),
        "initial_state": (sequences, channels, width - 1),
    }

    def make(key: jax.Array) -> Any:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        used = {field: shape for field, shape in shapes.items() if field in ("x", "weight", *optional)}
        arrays = {field: jax.random.normal(keys[field], shape).astype(dtype) for field, shape in used.items()}
        bounds = {"cu_seqlens": jnp.array(CU_SEQLENS, jnp.int32)} if "cu_seqlens" in optional else {}
        return record_type(**arrays, **bounds, **further_fields)

    return tagged_case(name, make, exercises, tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, sequences of even lengths."""

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        if name == "state_indices":
            return jnp.arange(shape.shape[0], dtype=shape.dtype)
        if name == "parents":
            return jnp.full(shape.shape, -1, shape.dtype)
        return even_cu_seqlens(args.x.shape[1], shape) if name == "cu_seqlens" else normal_like(key, shape)

    return fill_arguments(args, key, make)
