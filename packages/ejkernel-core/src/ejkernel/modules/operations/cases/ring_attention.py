"""Inputs for `ring_attention`: the named cases every backend is tested on, each on one device."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, make_inputs, qkv, timed_case_rows
from ejkernel.modules.operations.cases.pair_functions import rows_with_functions
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo

__all__ = ["cases", "make_inputs"]

LSE = {"return_lse": True}
SQUARE_SIZES = AttentionSizes(t=40, s=40, d=16, v=16)
CROSS_SIZES = AttentionSizes(t=33, s=63, d=60, v=60)


def _mask_arguments(key: jax.Array) -> dict[str, Any]:
    mask = jax.random.bernoulli(key, 0.6, (2, 1, 33, 63)).at[:, :, 3].set(False)
    return {"mask_info": MaskInfo(_attention_mask=mask), "bias": jax.random.normal(key, (2, 1, 1, 63))}


def _segment_arguments(key: jax.Array) -> dict[str, Any]:
    rows = [[0] * 15 + [1] * 20 + [-1] * 5, [0] * 7 + [1] * 33]
    return {
        "mask_info": MaskInfo.from_segments(jnp.array(rows, jnp.int32)),
        "causal": True,
        "chunk_size": 12,
        "return_lse": True,
    }


def _position_arguments(key: jax.Array) -> dict[str, Any]:
    q = jax.random.randint(key, (2, 40), 0, 40)
    return {"mask_info": MaskInfo(q_positions=q, kv_positions=jnp.arange(40)[None, ::-1]), "causal": True}


def _bias_and_sink_arguments(key: jax.Array) -> dict[str, Any]:
    bias, sinks = jax.random.normal(key, (2, 4, 40, 40)), jax.random.normal(key, (4, 2))
    return {"bias": bias, "softmax_aux": sinks, "logits_soft_cap": 1.5, **LSE}


def _packed_segment_arguments(key: jax.Array) -> dict[str, Any]:
    rows = [[0] * 50 + [1] * 70 + [-1] * 9, [0] * 20 + [1] * 109]
    options = {"causal": True, "sliding_window": (40, 5), "logits_soft_cap": 1.5}
    info = MaskInfo.from_segments(jnp.array(rows, jnp.int32))
    return {**LSE, "mask_info": info, "softmax_aux": jax.random.normal(key, (4, 2)), **options}


_CASE_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("causal, one KV head, values wider", AttentionSizes(g=1, v=48), lambda k: {"causal": True}, ("causal",), ()),
    ("window", SQUARE_SIZES, lambda k: {"sliding_window": (9, 3)}, ("sliding_window",), ()),
    (
        "bias, sinks and soft cap, lse",
        SQUARE_SIZES,
        _bias_and_sink_arguments,
        ("bias", "softmax_aux", "logits_soft_cap"),
        (),
    ),
    ("mask with empty rows, cross", CROSS_SIZES, _mask_arguments, ("mask",), ("awkward",)),
    (
        "segments with padding, in chunks, lse",
        SQUARE_SIZES,
        _segment_arguments,
        ("q_segment_ids", "kv_segment_ids"),
        (),
    ),
    ("positions", SQUARE_SIZES, _position_arguments, ("q_positions", "kv_positions"), ()),
    *rows_with_functions(CROSS_SIZES, SQUARE_SIZES),
    ("one token", AttentionSizes(b=1, t=1, s=1), lambda k: {}, (), ("awkward",)),
    ("bfloat16", AttentionSizes(t=129, s=129, dtype=jnp.bfloat16), lambda k: {"causal": True}, ("causal",), ()),
    (
        "bfloat16, packed sequences, window, sinks and soft cap, lse",
        AttentionSizes(t=129, s=129, d=64, v=64, dtype=jnp.bfloat16),
        _packed_segment_arguments,
        ("causal", "sliding_window", "q_segment_ids", "kv_segment_ids", "softmax_aux", "logits_soft_cap"),
        (),
    ),
    *timed_case_rows(),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, qkv, _CASE_TABLE)
