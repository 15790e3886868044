"""Conformance cases of Hopper's paged kernel, which serves head dimensions 64 and 128 in 16 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.paged_inputs import PagedSizes, packed_inputs, page_inputs, v2_inputs, v3_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.page_attention import PageAttentionArguments
from ejkernel.modules.operations.ragged_page_attention_v2 import RaggedPageAttentionv2Arguments
from ejkernel.modules.operations.ragged_page_attention_v3 import RaggedPageAttentionv3Arguments
from ejkernel.modules.operations.unified_attention import UnifiedAttentionArguments
from ejkernel.ops.model import LONG_ROWS_TAG, Case

# Small, since the reference gathers a row's keys for every head.
DECODE_PROBLEM = PagedSizes(kv_lens=(137, 1, 0, 64), h=8, g=2, d=128, v=128, s=16, dtype=jnp.bfloat16)
MIXED_BATCH_PROBLEM = PagedSizes(
    kv_lens=(150, 1, 40), q_lens=(20, 1, 9), query_rows=32, h=12, g=4, d=64, v=64, s=8, dtype=jnp.float16
)
PREFILL_PROBLEM = PagedSizes(
    kv_lens=(150, 1, 140, 300),
    q_lens=(40, 1, 130, 32),
    query_rows=210,
    h=4,
    g=2,
    d=128,
    v=128,
    s=16,
    dtype=jnp.bfloat16,
)
"""Has sequences with enough tokens for flash attention's kernel, one of two tiles, and one that decodes."""
SPLITS_PROBLEM = PagedSizes(
    kv_lens=(1, 1030, 1024, 2200), q_lens=(1, 3, 1, 35), query_rows=44, h=4, g=2, d=64, v=64, s=64, dtype=jnp.bfloat16
)
"""Has sequences of one, two and three splits of a `batch_invariant` block, in prefill and in decoding; the last one,
which is also computed alone, has the most.
"""
DECODE_SPLITS_PROBLEM = PagedSizes(kv_lens=(1, 0, 1025, 2500), h=4, g=2, d=128, v=128, s=128, dtype=jnp.float16)
CACHE_WRITE_PROBLEM = PagedSizes(
    kv_lens=(137, 1, 20), q_lens=(7, 1, 20), query_rows=30, h=4, g=2, d=128, s=16, dtype=jnp.bfloat16
)
PREFILL_HEAD_DIM_64_PROBLEM = dataclasses.replace(PREFILL_PROBLEM, d=64, v=64, s=8, dtype=jnp.float16)
WINDOW_OPTIONS = {"sliding_window": 30}
NON_CAUSAL_WINDOW_OPTIONS: dict[str, Any] = {"causal": False, "sliding_window": (40, 3)}
SCALE_OPTIONS: dict[str, Any] = {"v_scale": 3.0, "softmax_scale": 0.1}


def _no_options(key: jax.Array) -> dict[str, Any]:
    return {}


DECODE_SPLIT_CASES: tuple[Row[PagedSizes], ...] = (
    ("splits", DECODE_SPLITS_PROBLEM, _no_options, (), (LONG_ROWS_TAG,)),
)
SPLIT_CASES: tuple[Row[PagedSizes], ...] = (
    ("splits", SPLITS_PROBLEM, lambda key: {"return_lse": True}, (), (LONG_ROWS_TAG,)),
    ("splits, window", SPLITS_PROBLEM, lambda key: {"sliding_window": 1500}, ("sliding_window",), (LONG_ROWS_TAG,)),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    page: tuple[Row[PagedSizes], ...] = (
        ("head size 128, bfloat16", DECODE_PROBLEM, _no_options, (), ()),
        ("head size 128, window", DECODE_PROBLEM, lambda key: WINDOW_OPTIONS, ("sliding_window",), ()),
    )
    unified_cases: tuple[Row[PagedSizes], ...] = (
        ("head size 64, mixed", MIXED_BATCH_PROBLEM, lambda key: {"return_lse": True}, (), ()),
        ("head size 64, window", MIXED_BATCH_PROBLEM, lambda key: WINDOW_OPTIONS, ("sliding_window",), ()),
        ("head size 64, not causal", MIXED_BATCH_PROBLEM, lambda key: NON_CAUSAL_WINDOW_OPTIONS, ("causal",), ()),
        ("prefill", PREFILL_PROBLEM, lambda key: {"return_lse": True}, (), ()),
        ("prefill, window", PREFILL_PROBLEM, lambda key: {"sliding_window": 100}, ("sliding_window",), ()),
        (
            "prefill, head size 64, not causal",
            PREFILL_HEAD_DIM_64_PROBLEM,
            lambda key: NON_CAUSAL_WINDOW_OPTIONS,
            ("causal",),
            (),
        ),
    )
    v2: tuple[Row[PagedSizes], ...] = (
        ("head size 64, sequences", MIXED_BATCH_PROBLEM, _no_options, ("num_seqs",), ()),
    )
    new = ("new_keys", "new_values", "num_seqs", "value_scale")
    v3: tuple[Row[PagedSizes], ...] = (
        ("head size 128, written", CACHE_WRITE_PROBLEM, lambda key: SCALE_OPTIONS, new, ()),
        ("prefill, written", PREFILL_PROBLEM, lambda key: SCALE_OPTIONS, new, ()),
        (
            "head size 64, written",
            dataclasses.replace(CACHE_WRITE_PROBLEM, d=64),
            lambda key: {"softmax_scale": 0.1},
            (),
            (),
        ),
    )
    return {
        "page_attention": make_cases_of_rows(PageAttentionArguments, page_inputs, page + DECODE_SPLIT_CASES),
        "unified_attention": make_cases_of_rows(UnifiedAttentionArguments, packed_inputs, unified_cases + SPLIT_CASES),
        "ragged_page_attention_v2": make_cases_of_rows(RaggedPageAttentionv2Arguments, v2_inputs, v2),
        "ragged_page_attention_v3": make_cases_of_rows(RaggedPageAttentionv3Arguments, v3_inputs, v3),
    }
