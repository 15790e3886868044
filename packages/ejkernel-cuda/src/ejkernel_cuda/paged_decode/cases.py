"""Conformance cases of paged decode attention in CUDA C++: one query row per sequence, and caches of 16 and 8 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.paged_inputs import (
    PagedSizes,
    chunked_prefill_inputs,
    packed_inputs,
    page_inputs,
    prefill_inputs,
    ragged_decode_inputs,
    v2_inputs,
    v3_float8_inputs,
    v3_inputs,
    v3_int8_inputs,
)
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.chunked_prefill_paged_decode import ChunkedPrefillPagedDecodeArguments
from ejkernel.modules.operations.page_attention import PageAttentionArguments
from ejkernel.modules.operations.prefill_page_attention import PrefillPageAttentionArguments
from ejkernel.modules.operations.ragged_decode_attention import RaggedDecodeAttentionArguments
from ejkernel.modules.operations.ragged_page_attention_v2 import RaggedPageAttentionv2Arguments
from ejkernel.modules.operations.ragged_page_attention_v3 import RaggedPageAttentionv3Arguments
from ejkernel.modules.operations.unified_attention import UnifiedAttentionArguments
from ejkernel.ops.model import Case

DECODE_SIZES = PagedSizes(kv_lens=(537, 1, 0, 64), h=8, g=2, d=128, v=128, s=16, dtype=jnp.bfloat16)
"""Has sequences whose keys are split over several blocks, and sequences in one block."""
SMALL_HEAD_DIM_SIZES = PagedSizes(kv_lens=(70, 300), h=6, g=3, d=64, v=48, s=1, dtype=jnp.float16)
LARGE_HEAD_DIM_SIZES = PagedSizes(kv_lens=(129, 40), h=20, g=1, d=160, v=256, s=24, dtype=jnp.bfloat16)
"""Has more query heads than fit in one block, and page sizes that do not divide tiles."""
ONE_QUERY_PACKED_SIZES = PagedSizes(
    kv_lens=(537, 7, 20, 300), q_lens=(1, 1, 1, 1), h=8, g=2, d=128, v=128, s=16, dtype=jnp.bfloat16
)
UNEVEN_QUERY_SIZES = dataclasses.replace(ONE_QUERY_PACKED_SIZES, q_lens=(0, 3, 0, 1))
"""Has as many query rows as sequences, but not one for each."""
PADDED_HEAD_DIM_SIZES = dataclasses.replace(ONE_QUERY_PACKED_SIZES, h=4, d=96, v=96)
"""Has a cache in the layout of version 3 whose head dimension is padded."""
ONE_QUERY_PREFILL_SIZES = PagedSizes(kv_lens=(300,), q_lens=(1,), h=8, g=2, d=128, v=128, s=16, dtype=jnp.bfloat16)
DENSE_CACHE_SIZES = PagedSizes(kv_lens=(537, 1, 0, 64), h=8, g=2, d=128, v=128, s=540, dtype=jnp.bfloat16)
WINDOW_OPTIONS = {"sliding_window": 30}
TWO_SIDED_WINDOW_OPTIONS: dict[str, Any] = {"causal": False, "sliding_window": (40, 3)}
SOFT_CAP_OPTIONS: dict[str, Any] = {"logits_soft_cap": 1.5}
WINDOW_AND_SOFT_CAP_OPTIONS: dict[str, Any] = {"sliding_window": (300, None), "logits_soft_cap": 1.5}
SCALE_OPTIONS: dict[str, Any] = {"v_scale": 3.0, "softmax_scale": 0.1}
INT8_SCALE_OPTIONS: dict[str, Any] = {"q_scale": 0.03, "k_scale": 0.01, "v_scale": 0.02, "softmax_scale": None}


def _no_options(key: jax.Array) -> dict[str, Any]:
    return {}


def _sinks_with_lse(key: jax.Array) -> dict[str, Any]:
    """Returns sinks, and requests the lse, which includes them."""
    return {"softmax_aux": jax.random.normal(key, (8,), jnp.float32), "return_lse": True}


def _with_quantised_cache(inputs: Any, dtype: Any, names: tuple[str, ...] = ("key_cache", "value_cache")) -> Any:
    """Returns an input maker that converts the caches to another float dtype."""

    def make_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
        unquantised_inputs = inputs(key, sizes)
        return unquantised_inputs | {name: unquantised_inputs[name].astype(dtype) for name in names}

    return make_inputs


PAGE_ATTENTION_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, bfloat16", DECODE_SIZES, _no_options, (), ()),
    ("decode, head sizes 64 and 48, float16", SMALL_HEAD_DIM_SIZES, _no_options, (), ()),
    ("decode, 20 heads of 160 and 256", LARGE_HEAD_DIM_SIZES, _no_options, (), ("awkward",)),
    ("decode, sinks, lse", DECODE_SIZES, _sinks_with_lse, ("softmax_aux",), ()),
)
FLOAT8_E4M3_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, float8", DECODE_SIZES, _no_options, (), ()),
    ("decode, float8, window", DECODE_SIZES, lambda key: WINDOW_OPTIONS, ("sliding_window",), ()),
    ("decode, float8, head sizes 64 and 48", SMALL_HEAD_DIM_SIZES, _no_options, (), ()),
    ("decode, float8, 20 heads of 160 and 256", LARGE_HEAD_DIM_SIZES, _no_options, (), ("awkward",)),
)
FLOAT8_E5M2_CASES: tuple[Row[PagedSizes], ...] = (("decode, float8 of 5 bits", DECODE_SIZES, _no_options, (), ()),)
UNIFIED_ATTENTION_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, lse", ONE_QUERY_PACKED_SIZES, lambda key: {"return_lse": True}, (), ()),
    ("decode, rows of few sequences", UNEVEN_QUERY_SIZES, lambda key: WINDOW_OPTIONS, ("sliding_window",), ()),
    ("decode, not causal", UNEVEN_QUERY_SIZES, lambda key: TWO_SIDED_WINDOW_OPTIONS, ("causal",), ()),
    ("decode, soft cap", ONE_QUERY_PACKED_SIZES, lambda key: SOFT_CAP_OPTIONS, ("logits_soft_cap",), ()),
)
RAGGED_V2_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, sequences", ONE_QUERY_PACKED_SIZES, _no_options, ("num_seqs",), ()),
)
NEW_TOKEN_FIELDS = ("new_keys", "new_values", "value_scale", "num_seqs")
RAGGED_V3_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, written", ONE_QUERY_PACKED_SIZES, lambda key: SCALE_OPTIONS, NEW_TOKEN_FIELDS, ()),
)
FLOAT8_RAGGED_V3_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, float8, written", ONE_QUERY_PACKED_SIZES, lambda key: SCALE_OPTIONS, NEW_TOKEN_FIELDS, ()),
    (
        "decode, float8, written, padded",
        PADDED_HEAD_DIM_SIZES,
        lambda key: SCALE_OPTIONS,
        ("new_keys", "new_values"),
        (),
    ),
)
INT8_RAGGED_V3_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, int8, written", ONE_QUERY_PACKED_SIZES, lambda key: INT8_SCALE_OPTIONS, NEW_TOKEN_FIELDS, ()),
)
DENSE_CACHE_CASES: tuple[Row[PagedSizes], ...] = (
    (
        "decode, float8",
        DENSE_CACHE_SIZES,
        lambda key: WINDOW_AND_SOFT_CAP_OPTIONS,
        ("kv_starts", "sliding_window", "logits_soft_cap"),
        (),
    ),
)
CHUNKED_PREFILL_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, bfloat16", ONE_QUERY_PACKED_SIZES, _no_options, ("new_keys",), ()),
    ("decode, written, rows of few sequences", UNEVEN_QUERY_SIZES, _no_options, ("new_keys", "new_values"), ()),
)
PREFILL_PAGE_ATTENTION_CASES: tuple[Row[PagedSizes], ...] = (
    ("decode, float8", ONE_QUERY_PREFILL_SIZES, _no_options, (), ()),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {
        "page_attention": (
            *make_cases_of_rows(PageAttentionArguments, page_inputs, PAGE_ATTENTION_CASES),
            *make_cases_of_rows(
                PageAttentionArguments, _with_quantised_cache(page_inputs, jnp.float8_e4m3fn), FLOAT8_E4M3_CASES
            ),
            *make_cases_of_rows(
                PageAttentionArguments, _with_quantised_cache(page_inputs, jnp.float8_e5m2), FLOAT8_E5M2_CASES
            ),
        ),
        "unified_attention": make_cases_of_rows(UnifiedAttentionArguments, packed_inputs, UNIFIED_ATTENTION_CASES),
        "ragged_page_attention_v2": make_cases_of_rows(RaggedPageAttentionv2Arguments, v2_inputs, RAGGED_V2_CASES),
        "ragged_page_attention_v3": (
            *make_cases_of_rows(RaggedPageAttentionv3Arguments, v3_inputs, RAGGED_V3_CASES),
            *make_cases_of_rows(RaggedPageAttentionv3Arguments, v3_float8_inputs, FLOAT8_RAGGED_V3_CASES),
            *make_cases_of_rows(RaggedPageAttentionv3Arguments, v3_int8_inputs, INT8_RAGGED_V3_CASES),
        ),
        "chunked_prefill_paged_decode": make_cases_of_rows(
            ChunkedPrefillPagedDecodeArguments, chunked_prefill_inputs, CHUNKED_PREFILL_CASES
        ),
        "ragged_decode_attention": make_cases_of_rows(
            RaggedDecodeAttentionArguments,
            _with_quantised_cache(ragged_decode_inputs, jnp.float8_e4m3fn, ("key", "value")),
            DENSE_CACHE_CASES,
        ),
        "prefill_page_attention": make_cases_of_rows(
            PrefillPageAttentionArguments,
            _with_quantised_cache(prefill_inputs, jnp.float8_e4m3fn),
            PREFILL_PAGE_ATTENTION_CASES,
        ),
    }
