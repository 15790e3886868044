"""Inputs for `scaled_dot_product_attention`: the named cases every backend is tested on."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, qkv, timed_case_rows
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo

SMALL_SIZES = AttentionSizes(t=40, s=63, d=16, v=16)
SQUARE_SIZES = AttentionSizes(d=16, v=16)


def _mask_and_bias_arguments(key: jax.Array) -> dict[str, Any]:
    mask, bias = jax.random.split(key)
    allowed = jax.random.bernoulli(mask, 0.6, (2, 1, 40, 63)).at[:, :, 3].set(False)
    inputs = {"mask_info": MaskInfo(_attention_mask=allowed), "bias": jax.random.normal(bias, (1, 4, 40, 63))}
    return {**inputs, "return_lse": True}


def _position_arguments(key: jax.Array) -> dict[str, Any]:
    positions = jax.random.randint(key, (2, 40), 0, 63)
    info = MaskInfo(q_positions=positions, kv_positions=jnp.arange(63)[None] + 1)
    return {"mask_info": info, "causal": True, "sliding_window": (20, 0)}


def _packed_sequence_arguments(key: jax.Array) -> dict[str, Any]:
    return {"cum_seqlens_q": jnp.array([0, 40, 40, 90, 120], jnp.int32), "causal": True}


_CASE_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("plain", SQUARE_SIZES, lambda k: {}, (), ()),
    ("one query, head size 60", AttentionSizes(t=1, s=129, d=60, v=48), lambda k: {}, (), ("awkward",)),
    ("causal window", SQUARE_SIZES, lambda k: {"causal": True, "sliding_window": 9}, ("causal", "sliding_window"), ()),
    (
        "bias and mask, empty rows, lse",
        SMALL_SIZES,
        _mask_and_bias_arguments,
        ("bias", "mask"),
        ("awkward",),
    ),
    ("positions", SMALL_SIZES, _position_arguments, ("q_positions", "kv_positions", "causal", "sliding_window"), ()),
    (
        "packed",
        AttentionSizes(b=1, t=129, s=129, g=1, d=16, v=16),
        _packed_sequence_arguments,
        ("q_segment_ids", "kv_segment_ids"),
        ("awkward",),
    ),
    ("bfloat16", AttentionSizes(d=32, v=32, dtype=jnp.bfloat16), lambda k: {"causal": True}, ("causal",), ()),
    *timed_case_rows(),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, qkv, _CASE_TABLE)
