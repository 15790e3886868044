"""Inputs for `attention`: the named cases every backend is tested on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, exact_scores_inputs, qkv, timed_case_rows
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo

SMALL_SIZES = AttentionSizes(t=20, s=33, d=8, v=12)
SQUARE_SIZES = AttentionSizes(t=33, s=33, d=8, v=8)


def _mask_and_bias_arguments(key: jax.Array) -> dict[str, Any]:
    mask, bias = jax.random.split(key)
    allowed = jax.random.bernoulli(mask, 0.6, (2, 1, 20, 33)).at[:, :, 3].set(False)
    return {"mask_info": MaskInfo(_attention_mask=allowed), "bias": jax.random.normal(bias, (1, 2, 20, 33))}


def _position_and_window_arguments(key: jax.Array) -> dict[str, Any]:
    positions = jax.random.randint(key, (2, 20), 0, 33)
    info = MaskInfo(q_positions=positions, kv_positions=jnp.arange(33)[None] + 1)
    return {"mask_info": info, "causal": True, "sliding_window": (20, 0)}


def _segment_and_dropout_arguments(key: jax.Array) -> dict[str, Any]:
    ids = jnp.array([[0] * 13 + [1] * 15 + [-1] * 5, [0] * 33], jnp.int32)
    drops = {"deterministic": False, "dropout_prob": 0.3, "dropout_rng": jnp.uint32(7)}
    return {**drops, "mask_info": MaskInfo.from_segments(ids), "causal": True}


def _sink_and_soft_cap_arguments(key: jax.Array) -> dict[str, Any]:
    return {"softmax_aux": jax.random.normal(key, (4, 2)), "logits_soft_cap": 1.5, "sliding_window": 5}


_CASE_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("plain", SQUARE_SIZES, lambda k: {}, (), ()),
    ("one query, head size 60", AttentionSizes(t=1, s=129, g=1, d=60, v=48), lambda k: {}, (), ("awkward",)),
    ("bias of KV heads and mask, empty rows", SMALL_SIZES, _mask_and_bias_arguments, ("bias", "mask"), ("awkward",)),
    (
        "positions",
        SMALL_SIZES,
        _position_and_window_arguments,
        ("q_positions", "kv_positions", "causal", "sliding_window"),
        (),
    ),
    (
        "dropout of segments",
        SQUARE_SIZES,
        _segment_and_dropout_arguments,
        ("q_segment_ids", "kv_segment_ids", "dropout_prob", "dropout_seed", "causal"),
        (),
    ),
    (
        "capped, with sinks",
        SMALL_SIZES,
        _sink_and_soft_cap_arguments,
        ("softmax_aux", "logits_soft_cap", "sliding_window"),
        (),
    ),
    (
        "coarse logits",
        SQUARE_SIZES,
        lambda k: {**exact_scores_inputs(k, SQUARE_SIZES), "softmax_dtype": jnp.bfloat16},
        ("logits_dtype",),
        (),
    ),
    ("bfloat16", dataclasses.replace(SQUARE_SIZES, dtype=jnp.bfloat16), lambda k: {"causal": True}, ("causal",), ()),
    *timed_case_rows(1024),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, qkv, _CASE_TABLE)
