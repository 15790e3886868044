"""Conformance cases of `flash_attention` with `score_mod` and `mask_mod` next to its other options.

They belong to the kernels that translate functions, in `Implementation.cases`: XLA and TPUs compute functions as JAX
does, whatever the options are.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, qkv
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo

SIZES = AttentionSizes(t=128, s=128, d=64, v=64, dtype=jnp.bfloat16)
FLOAT32_SIZES = AttentionSizes()


def cases_of_options(record_type: type) -> tuple[Case, ...]:
    """Returns the cases in bfloat16, with heads of 64, as argument records of the given type."""
    return make_cases_of_rows(record_type, qkv, ROWS)


def cases_of_positions(record_type: type) -> tuple[Case, ...]:
    """Returns a case of float32 with positions of queries and keys."""
    return make_cases_of_rows(record_type, qkv, POSITION_ROWS)


def _functions(heads: int) -> dict[str, Any]:
    """Returns a decay with the distance, by head, and a prefix that is longer from head to head."""
    slopes = 0.1 * jnp.arange(1.0, heads + 1)
    return {
        "score_mod": lambda score, b, h, q_idx, k_idx: score - slopes[h] * jnp.abs(q_idx - k_idx),
        "mask_mod": lambda b, h, q_idx, k_idx: (k_idx >= 12 * h) | (q_idx % 3 == 0),
    }


def _segments_and_sinks(key: jax.Array) -> dict[str, Any]:
    ids = jnp.array([[0] * 50 + [1] * 70 + [-1] * 8, [0] * 20 + [1] * 40 + [2] * 68], jnp.int32)
    return _functions(SIZES.h) | {
        "mask_info": MaskInfo.from_segments(ids),
        "softmax_aux": jax.random.normal(key, (SIZES.h,)),
        "logits_soft_cap": 5.0,
        "causal": True,
        "return_lse": True,
    }


def _window_and_dropout(key: jax.Array) -> dict[str, Any]:
    del key
    return _functions(SIZES.h) | {"sliding_window": (40, 10), "dropout_prob": 0.3, "dropout_seed": jnp.uint32(7)}


def _positions(key: jax.Array) -> dict[str, Any]:
    z = FLOAT32_SIZES
    queries = jax.random.randint(key, (z.b, z.t), 0, z.s)
    keys = jnp.arange(z.s)[None, ::-1].repeat(z.b, 0)
    return _functions(z.h) | {
        "mask_info": MaskInfo(q_positions=queries, kv_positions=keys),
        "causal": True,
        "precision": jax.lax.Precision.HIGHEST,
    }


FUNCTIONS = ("score_mod", "mask_mod")
SEGMENTS_AND_SINKS = ("q_segment_ids", "kv_segment_ids", "softmax_aux", "logits_soft_cap", "causal")
ROWS: tuple[Row[AttentionSizes], ...] = (
    ("functions, segments, soft cap and sinks, lse", SIZES, _segments_and_sinks, (*FUNCTIONS, *SEGMENTS_AND_SINKS), ()),
    (
        "functions, window and dropout",
        SIZES,
        _window_and_dropout,
        (*FUNCTIONS, "sliding_window", "dropout_prob", "dropout_seed"),
        (),
    ),
)
POSITION_ROWS: tuple[Row[AttentionSizes], ...] = (
    ("functions, positions", FLOAT32_SIZES, _positions, (*FUNCTIONS, "q_positions", "kv_positions", "precision"), ()),
)
