"""Inputs for the recurrences: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import even_cu_seqlens, fill_arguments, normal_like, tagged_case
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class RecurrenceSizes:
    """Shape of a call: rows, tokens, heads, KV heads, key and value channels; `n` packed sequences, 0 for none."""

    b: int = 2
    t: int = 11
    h: int = 4
    g: int = 4
    k: int = 8
    v: int = 8
    n: int = 0
    dtype: Any = jnp.float32

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an argument."""
        b, t, h, g, k, v = self.b, self.t, self.h, self.g, self.k, self.v
        return {
            "query": (b, t, h, k),
            "key": (b, t, g, k),
            "value": (b, t, g, v),
            "g": (b, t, h),
            "gate of channels": (b, t, h, k),
            "gk": (b, t, h, k),
            "gv": (b, t, h, v),
            "g_gamma": (h,),
            "decay": (b, t, h),
            "beta": (b, t, h),
            "initial_state": (self.n or b, h, k, v),
        }[name]


ExtraArgumentsMaker = Callable[[jax.Array, RecurrenceSizes], dict[str, Any]]
Row = tuple[str, RecurrenceSizes, ExtraArgumentsMaker, tuple[str, ...], tuple[str, ...]]
"""Name, sizes, arguments after query, key and value, optional record fields the case is about, further tags."""


def make_cases(record_type: type, rows: Iterable[Row]) -> tuple[Case, ...]:
    """Returns the rows as cases that make argument records of the given type."""
    return tuple(_make_case(record_type, *row) for row in rows)


def _make_case(
    record_type: type,
    name: str,
    sizes: RecurrenceSizes,
    make_extra_arguments: ExtraArgumentsMaker,
    exercises: Any,
    tags: Any,
) -> Case:
    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        tokens = {
            field: normal(k, sizes.shape(field), sizes.dtype)
            for field, k in zip(("query", "key", "value"), keys, strict=False)
        }
        return record_type(**tokens | make_extra_arguments(keys[3], sizes))

    return tagged_case(name, make, exercises, tags)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Returns normal floats."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def states_in_slots(
    key: jax.Array, shape: tuple[int, ...], used_slots: Iterable[int], dtype: Any = jnp.float32
) -> jax.Array:
    """Returns normal states in those slots that are used, and inf in the others, which stay as they are."""
    index = jnp.array(sorted(used_slots))
    return jnp.full(shape, jnp.inf, dtype).at[index].set(normal(key, (index.size, *shape[1:]), dtype))


def log_gate(key: jax.Array, shape: tuple[int, ...], strength: float = 0.3) -> jax.Array:
    """Returns log gates, of which a few are very strong."""
    weak, uniform = (jax.random.uniform(k, shape) for k in jax.random.split(key))
    return -strength * weak - jnp.where(uniform > 0.97, 200.0, 0.0)


def gate_maker(*names: str, **constants: Any) -> ExtraArgumentsMaker:
    """Returns random values for the named arguments, and constants."""

    def make(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, k in zip(names, jax.random.split(key, max(1, len(names))), strict=False):
            shape = sizes.shape(name)
            if name == "initial_state":
                fields[name] = normal(k, shape)
            elif name == "beta":
                fields[name] = jax.random.uniform(k, shape)
            else:
                fields["g" if name == "gate of channels" else name] = log_gate(k, shape)
        return fields | constants

    return make


PACKED_CU_SEQLENS = (0, 1, 1, 10, 10)
_PACKED_SIZES = RecurrenceSizes(b=1, t=11, n=len(PACKED_CU_SEQLENS) - 1)
_BF16_ARGUMENTS = {"dtype": jnp.bfloat16}


def packed_cu_seqlens() -> jax.Array:
    """Returns cumulative lengths for a packed case, with an empty sequence and padding tokens after the last."""
    return jnp.array(PACKED_CU_SEQLENS, jnp.int32)


def _packed_gate_maker(*names: str, **constants: Any) -> ExtraArgumentsMaker:
    return lambda key, sizes: gate_maker(*names, cu_seqlens=packed_cu_seqlens(), **constants)(key, sizes)


def _slotted_state_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns a packed step whose states are in slots: one request has no slot, and one no tokens."""
    fields = gate_maker("gate of channels", return_state=True)(key, sizes)
    slots = states_in_slots(key, (6, *sizes.shape("initial_state")[1:]), (5, 3), sizes.dtype)
    starts, indices = jnp.array([0, 1, 1, 4, 5], jnp.int32), jnp.array([5, 3, 3, -1], jnp.int32)
    return {**fields, "initial_state": slots, "cu_seqlens": starts, "state_indices": indices}


def _tree_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns packed trees of draft tokens, whose states in slots stay as they are, in a call that returns none."""
    fields = gate_maker("gate of channels")(key, sizes)
    slots = states_in_slots(key, (6, *sizes.shape("initial_state")[1:]), (5, 3), sizes.dtype)
    starts, indices = jnp.array([0, 5, 5, 8], jnp.int32), jnp.array([5, 0, 3], jnp.int32)
    parents = jnp.array([[-1, 0, 0, 2, 1, -1, -1, 0, 0]], jnp.int32)
    return {**fields, "initial_state": slots, "cu_seqlens": starts, "state_indices": indices, "parents": parents}


def _segment_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns two segments per row with padding in front and between, and a state for the first."""
    token = jnp.arange(sizes.t)
    ids = jnp.where((token % 5 < 1) | (token > 9), -1, token // 4)
    fields = gate_maker("g", "initial_state", return_state=True)(key, sizes)
    return {**fields, "seg_ids": jnp.stack([ids, jnp.roll(ids, 3)])[: sizes.b].astype(jnp.int32)}


def _slope_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Slopes of the heads."""
    return {"slopes": jax.random.uniform(key, sizes.shape("g_gamma"))}


_SLOT_FIELDS: tuple[str, ...] = ("decay", "cu_seqlens", "sequence_state", "state_slots")
_MODEL_ROW: Row = ("model", RecurrenceSizes(b=1, t=4096, h=8, g=8, k=64, v=64), gate_maker("g"), (), ("bench",))
_SMALL_MODEL_ROW: Row = (
    "small model",
    RecurrenceSizes(b=1, t=512, h=4, g=4, k=64, v=64),
    gate_maker("g"),
    (),
    ("bench_cpu",),
)
_PACKED_ROW: Row = (
    "packed",
    _PACKED_SIZES,
    _packed_gate_maker("gate of channels", "g_gamma", "initial_state", return_state=True),
    ("decay", "cu_seqlens", "sequence_state"),
    (),
)
_RECURRENT_ROWS: tuple[Row, ...] = (
    ("no gates", RecurrenceSizes(t=7, g=1, k=6, v=10), gate_maker(), (), ("awkward",)),
    (
        "gate of heads, states",
        RecurrenceSizes(t=40),
        gate_maker("g", "initial_state", return_state=True),
        ("decay", "initial_state"),
        (),
    ),
    (
        "gates of keys and values",
        RecurrenceSizes(g=2, v=12),
        gate_maker("g_gamma", "gk", "gv"),
        ("decay", "value_decay"),
        (),
    ),
    ("gate of heads for all tokens, reversed", RecurrenceSizes(), gate_maker("g_gamma", reverse=True), ("decay",), ()),
    _PACKED_ROW,
    _MODEL_ROW,
    _SMALL_MODEL_ROW,
)
_GATED_ROWS: tuple[Row, ...] = (
    (
        "one token with a state",
        RecurrenceSizes(t=1, g=2),
        gate_maker("g", "initial_state", return_state=True),
        ("initial_state",),
        ("awkward",),
    ),
    ("gate of channels, grouped", RecurrenceSizes(g=2, v=12), gate_maker("gate of channels"), ("decay",), ()),
    ("bfloat16", RecurrenceSizes(g=2, **_BF16_ARGUMENTS), gate_maker("g"), ("decay",), ()),
    _PACKED_ROW,
    ("segments with padding", RecurrenceSizes(g=2), _segment_inputs, ("segment_ids", "initial_state"), ()),
    (
        "slots in bfloat16",
        RecurrenceSizes(b=1, t=6, g=2, n=4, **_BF16_ARGUMENTS),
        _slotted_state_inputs,
        _SLOT_FIELDS,
        (),
    ),
    (
        "trees of draft tokens, no states",
        RecurrenceSizes(b=1, t=9, g=2, n=3),
        _tree_inputs,
        (*_SLOT_FIELDS, "parents", "keeps_token_states"),
        (),
    ),
    _MODEL_ROW,
    _SMALL_MODEL_ROW,
)
_CONSTANT_DECAY_ROWS: tuple[Row, ...] = (
    ("grouped", RecurrenceSizes(g=2, v=12), gate_maker(layer_idx=1, num_layers=4), ("decay",), ()),
    (
        "states, reversed",
        RecurrenceSizes(),
        gate_maker("initial_state", layer_idx=1, num_layers=4, reverse=True, return_state=True),
        ("decay", "initial_state"),
        (),
    ),
    ("slopes", RecurrenceSizes(t=7, g=2), _slope_inputs, ("decay",), ()),
    ("last layer", RecurrenceSizes(t=7), gate_maker(layer_idx=4, num_layers=4), (), ("awkward",)),
    (
        "packed",
        _PACKED_SIZES,
        _packed_gate_maker("initial_state", layer_idx=1, num_layers=4, return_state=True),
        ("decay", "cu_seqlens", "sequence_state"),
        (),
    ),
    (*_MODEL_ROW[:2], gate_maker(layer_idx=1, num_layers=4), *_MODEL_ROW[3:]),
    (*_SMALL_MODEL_ROW[:2], gate_maker(layer_idx=1, num_layers=4), *_SMALL_MODEL_ROW[3:]),
)


def recurrent_attention_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `recurrent_attention`."""
    return make_cases(record_type, _RECURRENT_ROWS)


def gated_linear_attention_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `gated_linear_attention`."""
    return make_cases(record_type, _GATED_ROWS)


def lightning_attention_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `lightning_attention`."""
    return make_cases(record_type, _CONSTANT_DECAY_ROWS)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: weak gates, short keys, even lengths, one
    segment.
    """
    return fill_arguments(args, key, functools.partial(_make_argument, args))


_LOG_GATE_FIELDS = frozenset({"g", "g_gamma", "gk", "gv", "decay", "A"})


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> jax.Array:
    if name in ("cu_seqlens", "query_start_loc"):
        tokens = (args.x if hasattr(args, "x") else args.query).shape[-3]
        return even_cu_seqlens(tokens, shape)
    if name == "state_indices":
        return jnp.arange(shape.shape[0], dtype=shape.dtype)
    if name == "parents":
        return jnp.full(shape.shape, -1, shape.dtype)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.zeros(shape.shape, shape.dtype)
    if name in _LOG_GATE_FIELDS:
        return -0.1 * jax.random.uniform(key, shape.shape).astype(shape.dtype)
    if name in ("beta", "dt", "slopes"):
        return jax.random.uniform(key, shape.shape).astype(shape.dtype)
    return normal_like(key, shape, shape.shape[-1] ** -0.5 if name == "key" else 1.0)
