"""Inputs for the delta rules: the named cases every backend is tested on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import (
    PACKED_CU_SEQLENS,
    RecurrenceSizes,
    Row,
    gate_maker,
    log_gate,
    make_cases,
    make_inputs,
    normal,
    states_in_slots,
)
from ejkernel.modules.operations.cases.tables import ROW_FUNCTIONS_TAG
from ejkernel.ops.model import Case

NUM_SLOTS = 6


def _beta_channel_decay_and_state(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, jax.Array]:
    """Returns beta, a decay for each key channel, and a state."""
    beta, decay, state = jax.random.split(key, 3)
    fields = gate_maker("beta", "initial_state")(state, sizes)
    return {
        **fields,
        "beta": jax.random.uniform(beta, sizes.shape("beta")),
        "decay": log_gate(decay, sizes.shape("gk")),
    }


def segment_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, jax.Array]:
    """Returns inputs with three segments per row, padding before, between and after them, and a state for the first."""
    token = jnp.arange(sizes.t)
    ids = jnp.where((token % 5 < 1) | (token > 9), -1, token // 4)
    inputs = gate_maker("beta", "decay", "initial_state", return_state=True)(key, sizes)
    return {**inputs, "seg_ids": jnp.stack([ids, jnp.roll(ids, 3)])[: sizes.b].astype(jnp.int32)}


def _shared_key_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns inputs with twice as many value heads as query and key heads."""
    query, keys, value = (normal(k, sizes.shape("key")) for k in jax.random.split(key, 3))
    inputs = gate_maker("beta", "decay", "initial_state", return_state=True, softmax_scale=0.3)(key, sizes)
    return {**inputs, "query": query, "key": keys, "value": jnp.concatenate([value, value[::-1]], axis=2)}


def _packed_sequence_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Sequences with states of their own, one of them empty, and padding tokens."""
    return gate_maker("beta", "decay", "initial_state", return_state=True, cu_seqlens=jnp.array(PACKED_CU_SEQLENS))(
        key, sizes
    )


def _weak_correction_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns weak corrections for keys that are not normalised: strong corrections for long keys make the recurrence
    itself grow.
    """
    inputs = gate_maker("beta", "decay")(key, sizes)
    return {**inputs, "beta": inputs["beta"] / sizes.k, "use_qk_l2norm": False, "softmax_scale": 0.3}


TREE_PARENTS = ((-1, 0, 0, 1, 1, 2, 5), (-1, -1, 1, 1, 0, 4, 3))
"""Two trees of seven draft tokens; the second has two roots."""


def tree_inputs(key: jax.Array, sizes: RecurrenceSizes) -> dict[str, Any]:
    """Returns inputs with a tree of draft tokens in each row, and a state for each."""
    inputs = gate_maker("beta", "decay", "initial_state", return_state=True)(key, sizes)
    return {**inputs, "parents": jnp.array(TREE_PARENTS, jnp.int32)}


_OPTIONAL_FIELDS = ("beta", "decay", "initial_state")
_SHARED_KEYS_ROW: Row = (
    "more value heads than key heads",
    RecurrenceSizes(g=2),
    _shared_key_inputs,
    _OPTIONAL_FIELDS,
    (),
)
_PACKED_ROW: Row = (
    "packed, states",
    RecurrenceSizes(b=1, g=2, n=len(PACKED_CU_SEQLENS) - 1),
    _packed_sequence_inputs,
    ("beta", "decay", "cu_seqlens", "sequence_state"),
    ("awkward",),
)
_CHANNEL_DECAY_ROW: Row = (
    "decay of channels, grouped",
    RecurrenceSizes(g=2, v=12),
    _beta_channel_decay_and_state,
    _OPTIONAL_FIELDS,
    (),
)
_MODEL_ROW: Row = (
    "model",
    RecurrenceSizes(b=1, t=4096, h=8, g=8, k=64, v=64),
    gate_maker("beta", "decay"),
    (),
    ("bench",),
)
_SMALL_MODEL_ROW: Row = (
    "small model",
    RecurrenceSizes(b=1, t=512, h=4, g=4, k=64, v=64),
    gate_maker("beta", "decay"),
    (),
    ("bench_cpu",),
)
_LONG_HEADS_ROW: Row = (
    "norms of long heads",
    RecurrenceSizes(b=3, t=9, h=2, g=2, k=64, v=16),
    gate_maker("beta", "decay", "initial_state", return_state=True),
    (),
    (ROW_FUNCTIONS_TAG,),
)
_KERNEL_DELTA_ROWS: tuple[Row, ...] = (
    ("no decay", RecurrenceSizes(t=7, g=1, k=6, v=10), gate_maker("beta"), ("beta",), ("awkward",)),
    ("keys as they are", RecurrenceSizes(), _weak_correction_inputs, ("beta",), ()),
    _CHANNEL_DECAY_ROW,
    ("bfloat16", RecurrenceSizes(g=2, dtype=jnp.bfloat16), gate_maker("beta", "decay"), ("beta", "decay"), ()),
    ("segments with padding", RecurrenceSizes(), segment_inputs, ("segment_ids", "initial_state"), ()),
    _PACKED_ROW,
    _MODEL_ROW,
    _SMALL_MODEL_ROW,
    _LONG_HEADS_ROW,
)
_GATED_DELTA_ROWS: tuple[Row, ...] = (
    (
        "one token with a state",
        RecurrenceSizes(t=1, g=2),
        gate_maker("beta", "decay", "initial_state", return_state=True),
        ("initial_state",),
        ("awkward",),
    ),
    (
        "decay of heads, states",
        RecurrenceSizes(t=40),
        gate_maker("beta", "decay", "initial_state", return_state=True),
        ("beta", "decay", "initial_state"),
        (),
    ),
    _CHANNEL_DECAY_ROW,
    ("segments with padding", RecurrenceSizes(), segment_inputs, ("segment_ids", "initial_state"), ()),
    ("trees of draft tokens", RecurrenceSizes(t=7, g=2), tree_inputs, ("parents", "initial_state"), ("awkward",)),
    _SHARED_KEYS_ROW,
    _MODEL_ROW,
    _SMALL_MODEL_ROW,
    _LONG_HEADS_ROW,
)


def kernel_delta_attention_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `kernel_delta_attention`."""
    return make_cases(record_type, _KERNEL_DELTA_ROWS)


def gated_delta_rule_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `gated_delta_rule`."""
    return make_cases(record_type, _GATED_DELTA_ROWS)


# name, tokens, KV heads, lengths, slots, decay of heads or channels, dtype
_RAGGED_DELTA_ROWS: tuple[tuple[str, int, int, tuple[int, ...], tuple[int, ...], str | None, Any], ...] = (
    ("prefill and empty", 11, 2, PACKED_CU_SEQLENS, (5, 0, 2, 1), "decay", jnp.float32),
    ("decode, no decay", 5, 4, (0, 1, 2, 2, 3), (4, 0, 0, 1), None, jnp.float32),
    ("mixed, decay of channels", 13, 1, (0, 1, 2, 2, 11, 12), (3, 1, 3, 0, -1), "gk", jnp.float32),
    ("bfloat16", 13, 2, (0, 1, 2, 2, 11, 12), (3, 1, 3, 0, -1), "decay", jnp.bfloat16),
    ("trees of draft tokens", 9, 2, (0, 5, 5, 8), (3, 0, -1), "gk", jnp.bfloat16),
)
_PACKED_PARENTS = (-1, 0, 0, 1, 3, -1, -1, 1, 0)
"""The trees of the last of these; the last token belongs to none."""


def ragged_gated_delta_rule_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_gated_delta_rule`."""
    steps = (("model", 64, 16, 128, jnp.bfloat16, "bench"), ("small model", 8, 4, 64, jnp.float32, "bench_cpu"))
    return (
        *(_ragged_case(record_type, *row) for row in _RAGGED_DELTA_ROWS),
        *(_decode_step_case(record_type, *step) for step in steps),
    )


def _decode_step_case(
    record_type: type, name: str, num_requests: int, heads: int, dim: int, dtype: Any, tag: str
) -> Case:
    """Returns a step of decoding to time: one token of each request, whose states are in slots."""
    tokens, bounds = (
        jax.ShapeDtypeStruct((num_requests, heads, dim), dtype),
        jax.ShapeDtypeStruct((num_requests + 1,), "int32"),
    )
    gate = jax.ShapeDtypeStruct((num_requests, heads), jnp.float32)
    shapes = record_type(
        query=tokens,
        key=tokens,
        value=tokens,
        beta=gate,
        decay=gate,
        recurrent_state=jax.ShapeDtypeStruct((num_requests, heads, dim, dim), jnp.float32),
        query_start_loc=bounds,
        state_indices=jax.ShapeDtypeStruct((num_requests,), jnp.int32),
    )
    return Case(name=name, make=functools.partial(make_inputs, shapes), tags=frozenset({tag}))


def _ragged_case(
    record_type: type,
    name: str,
    num_tokens: int,
    num_kv_heads: int,
    cu_seqlens: tuple[int, ...],
    slot_indices: tuple[int, ...],
    decay_name: str | None,
    dtype: Any,
) -> Case:
    sizes, in_trees = RecurrenceSizes(b=1, t=num_tokens, g=num_kv_heads, v=12), name.startswith("trees")
    # Slots of empty requests are not among them.
    used = {index for n, index in enumerate(slot_indices) if index >= 0 and cu_seqlens[n + 1] > cu_seqlens[n]}

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 6)
        fields = ("query", "key", "value")
        return record_type(
            **{field: normal(k, sizes.shape(field)[1:], dtype) for field, k in zip(fields, keys, strict=False)},
            beta=jax.random.uniform(keys[4], (num_tokens, sizes.h)),
            decay=None if decay_name is None else log_gate(keys[3], sizes.shape(decay_name)[1:]),
            recurrent_state=states_in_slots(keys[5], (NUM_SLOTS, sizes.h, sizes.k, sizes.v), used, dtype),
            query_start_loc=jnp.array(cu_seqlens, jnp.int32),
            state_indices=jnp.array(slot_indices, jnp.int32),
            parents=jnp.array(_PACKED_PARENTS, jnp.int32) if in_trees else None,
        )

    exercised = ["beta", "cu_seqlens", "sequence_state", "state_slots", *(() if decay_name is None else ("decay",))]
    exercised += ["parents"] if in_trees else []
    return Case(name=name, make=make, tags=frozenset({"ci"}), exercises=frozenset(exercised))
