"""The named cases of the operations over paged caches, on which every backend is tested."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.paged_arguments import (
    CHUNK_SIZE_FIELDS,
    FLOAT8_SCALES,
    LSE,
    PACKED_TREE_FIELDS,
    TREE_FIELDS,
    TWO_SIDED_WINDOW_ARGUMENTS,
    WINDOW_AND_SOFT_CAP,
    bfloat16_sizes,
    chunk_size_and_scale_arguments,
    functions_of_positions,
    masking_qq_bias,
    no_arguments,
    packed_tree_arguments,
    random_per_head,
    shared_prefix_and_sink_arguments,
    shared_sink_arguments,
    sinks_and_lse,
    slopes_and_qq_bias,
    tree_arguments,
    with_float8_cache,
)
from ejkernel.modules.operations.cases.paged_inputs import (
    PagedSizes,
    chunked_prefill_inputs,
    decode_inputs,
    normal_arrays,
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
from ejkernel.ops.model import Case

DECODE_SIZES = PagedSizes()
SMALL_DECODE_SIZES = PagedSizes(kv_lens=(500, 400, 300, 200), h=8, g=2, d=64, v=64)
SMALL_MIXED_SIZES = PagedSizes(kv_lens=(256, 150, 50, 200), q_lens=(29, 1, 1, 1), h=8, g=2, d=64, v=64)
SMALL_UNUSED_SEQUENCE_SIZES = PagedSizes(
    kv_lens=(256, 150, 50, 200, 1), q_lens=(29, 1, 1, 1, 0), h=8, g=2, d=128, v=128
)
MIXED_BATCH_SIZES = PagedSizes(kv_lens=(37, 1, 0, 64, 20), q_lens=(7, 1, 0, 1, 20), query_rows=33)
MODEL_MIXED_SIZES = PagedSizes(
    kv_lens=(4096, 2000, 1000, 3000), q_lens=(1021, 1, 1, 1), h=32, g=8, d=128, v=128, dtype=jnp.bfloat16
)
MODEL_UNUSED_SEQUENCE_SIZES = dataclasses.replace(
    MODEL_MIXED_SIZES, kv_lens=(*MODEL_MIXED_SIZES.kv_lens, 1), q_lens=(1021, 1, 1, 1, 0)
)
PREFIX_SIZES = PagedSizes(kv_lens=(37, 40, 50, 0), q_lens=(7, 1, 20, 0), query_rows=30)
SHARED_KV_HEAD_SIZES = PagedSizes(kv_lens=(70, 5), h=8, g=1, d=60, v=60, s=8)

_SINKS_ROW: Row[PagedSizes] = (
    "sinks, lse, bfloat16",
    bfloat16_sizes(MIXED_BATCH_SIZES),
    lambda k: sinks_and_lse(k, MIXED_BATCH_SIZES),
    ("softmax_aux",),
    (),
)
_TREE_ROW: Row[PagedSizes] = (
    "a tree per sequence, and everything",
    PREFIX_SIZES,
    lambda k: tree_arguments(k, PREFIX_SIZES),
    TREE_FIELDS,
    ("awkward",),
)


def page_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `page_attention`."""
    short = PagedSizes(kv_lens=(64, 33), pages_per_table=9, dtype=jnp.bfloat16)
    model = PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", DECODE_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", SHARED_KV_HEAD_SIZES, no_arguments, (), ("awkward",)),
        ("one key, values wider", PagedSizes(kv_lens=(1,), g=4, v=48, s=1), no_arguments, (), ("awkward",)),
        ("window", DECODE_SIZES, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("sinks, lse", DECODE_SIZES, lambda k: sinks_and_lse(k, DECODE_SIZES), ("softmax_aux",), ()),
        ("soft cap", DECODE_SIZES, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        (
            "chunks, alibi and scales, lse",
            DECODE_SIZES,
            lambda k: chunk_size_and_scale_arguments(k, DECODE_SIZES),
            CHUNK_SIZE_FIELDS,
            (),
        ),
        ("wide table, bfloat16", short, lambda k: {"max_context_len": 70}, (), ()),
        ("score and mask functions, lse", DECODE_SIZES, functions_of_positions, ("score_mod", "mask_mod"), ()),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", SMALL_DECODE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    common = PagedSizes(kv_lens=(37, 40, 50, 0))
    eight: tuple[Row[PagedSizes], ...] = (
        (
            "float8, scales and shared prefix",
            common,
            lambda k: {**shared_prefix_and_sink_arguments(k, common), **FLOAT8_SCALES},
            ("shared_prefix", "value_scale", "softmax_aux"),
            (),
        ),
    )
    return (
        *make_cases_of_rows(record_type, page_inputs, rows),
        *make_cases_of_rows(record_type, with_float8_cache(page_inputs), eight),
    )


def unified_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `unified_attention`."""
    long = PagedSizes(kv_lens=(129, 40), q_lens=(63, 40), h=8, g=1, d=60, v=48)
    both = ("alibi_slopes", "qq_bias", "logits_soft_cap")
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        ("window", MIXED_BATCH_SIZES, lambda k: {"sliding_window": 5}, ("sliding_window",), ()),
        ("not causal, window on both sides", MIXED_BATCH_SIZES, lambda k: TWO_SIDED_WINDOW_ARGUMENTS, ("causal",), ()),
        (
            "biases and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: {**slopes_and_qq_bias(k, MIXED_BATCH_SIZES), "logits_soft_cap": 1.5},
            both,
            (),
        ),
        ("score and mask functions, lse", MIXED_BATCH_SIZES, functions_of_positions, ("score_mod", "mask_mod"), ()),
        ("qq_bias of -inf and soft cap, lse", MIXED_BATCH_SIZES, masking_qq_bias, both[1:], ("awkward",)),
        _SINKS_ROW,
        (
            "shared prefix, sinks",
            PREFIX_SIZES,
            lambda k: shared_prefix_and_sink_arguments(k, PREFIX_SIZES),
            ("shared_prefix", "softmax_aux"),
            (),
        ),
        _TREE_ROW,
        (
            "packed trees, shared prefix, window",
            PREFIX_SIZES,
            lambda k: packed_tree_arguments(k, PREFIX_SIZES),
            PACKED_TREE_FIELDS,
            (),
        ),
        ("model", MODEL_MIXED_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_MIXED_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, packed_inputs, rows)


def v2_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v2`."""
    long = PagedSizes(kv_lens=(129, 40, 9), q_lens=(63, 40, 9), h=8, g=1, d=60, v=60)
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, ("num_seqs",), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        (
            "window and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: WINDOW_AND_SOFT_CAP,
            ("sliding_window", "logits_soft_cap"),
            (),
        ),
        _SINKS_ROW,
        (
            "chunks, alibi and scales, lse",
            MIXED_BATCH_SIZES,
            lambda k: chunk_size_and_scale_arguments(k, MIXED_BATCH_SIZES),
            CHUNK_SIZE_FIELDS,
            (),
        ),
        ("rounded operands", MIXED_BATCH_SIZES, lambda k: {"compute_dtype": jnp.bfloat16}, ("compute_dtype",), ()),
        ("score and mask functions, lse", MIXED_BATCH_SIZES, functions_of_positions, ("score_mod", "mask_mod"), ()),
        ("model", MODEL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, v2_inputs, rows)


def v3_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v3`."""
    small = PagedSizes(kv_lens=(37, 1, 20), q_lens=(7, 1, 20), query_rows=30, h=4, g=2, d=64, s=8)
    wide = dataclasses.replace(small, d=128)
    scaled = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0, "softmax_scale": None}
    plain = ("new_keys", "new_values", "num_seqs")
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", wide, lambda k: {"softmax_scale": 0.1}, plain, ()),
        ("window and soft cap", wide, lambda k: WINDOW_AND_SOFT_CAP, ("sliding_window", "logits_soft_cap"), ()),
        ("head size 64, sinks, lse", small, lambda k: sinks_and_lse(k, small), ("softmax_aux",), ()),
        ("scales", small, lambda k: scaled, ("value_scale",), ()),
        (
            "chunks, alibi and scales, lse",
            wide,
            lambda k: chunk_size_and_scale_arguments(k, wide),
            CHUNK_SIZE_FIELDS,
            (),
        ),
        ("score and mask functions, lse", wide, functions_of_positions, ("score_mod", "mask_mod"), ()),
        ("model", MODEL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    halved: tuple[Row[PagedSizes], ...] = (
        ("head size 64 in lanes, bfloat16", bfloat16_sizes(small), lambda k: {"softmax_scale": None}, (), ()),
    )
    odd = dataclasses.replace(small, h=3, g=3)
    integers = {"q_scale": 0.03, "k_scale": 0.01, "v_scale": 0.02, "softmax_scale": None}
    eight: tuple[Row[PagedSizes], ...] = (("int8, scales", wide, lambda k: integers, ("value_scale",), ()),)
    padded: tuple[Row[PagedSizes], ...] = (
        ("padded heads, float8", odd, lambda k: {"softmax_scale": None}, ("kv_heads",), ("awkward",)),
    )
    return (
        *make_cases_of_rows(record_type, v3_inputs, rows),
        *make_cases_of_rows(record_type, functools.partial(v3_inputs, in_lanes_layout=True), halved),
        *make_cases_of_rows(record_type, v3_float8_inputs, padded),
        *make_cases_of_rows(record_type, v3_int8_inputs, eight),
    )


def chunked_prefill_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `chunked_prefill_paged_decode`."""
    long = PagedSizes(kv_lens=(70, 40), q_lens=(63, 40), h=8, g=1, d=60, v=48)
    capped = {"logits_soft_cap": 1.5}
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, ("new_keys", "new_values"), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        (
            "not causal, window on both sides",
            MIXED_BATCH_SIZES,
            lambda k: TWO_SIDED_WINDOW_ARGUMENTS,
            ("causal", "sliding_window"),
            (),
        ),
        (
            "alibi and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: {**random_per_head(k, "alibi_slopes", MIXED_BATCH_SIZES), **capped},
            ("alibi_slopes", "logits_soft_cap"),
            (),
        ),
        _TREE_ROW,
        _SINKS_ROW,
        ("model", MODEL_MIXED_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_MIXED_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, chunked_prefill_inputs, rows)


def _decode_chunk_arguments(key: jax.Array) -> dict[str, Any]:
    return {name: value for name, value in chunk_size_and_scale_arguments(key, DECODE_SIZES).items() if name not in LSE}


def decode_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `decode_attention`."""
    model = PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows_of_tokens = PagedSizes(kv_lens=(19, 0, 5), h=4, g=4, s=1, v=48)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", DECODE_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", SHARED_KV_HEAD_SIZES, no_arguments, (), ("awkward",)),
        ("rows of tokens, soft cap", rows_of_tokens, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("window", DECODE_SIZES, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("chunks, alibi and scales", DECODE_SIZES, _decode_chunk_arguments, CHUNK_SIZE_FIELDS, ()),
        (
            "sinks, bfloat16",
            bfloat16_sizes(DECODE_SIZES),
            lambda k: random_per_head(k, "softmax_aux", DECODE_SIZES),
            ("softmax_aux",),
            (),
        ),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", SMALL_DECODE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, decode_inputs, rows)


def prefill_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `prefill_page_attention`."""
    chunk = PagedSizes(kv_lens=(70,), q_lens=(23,), pages_per_table=7)
    model = PagedSizes(kv_lens=(4096,), q_lens=(1024,), h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("chunk", chunk, no_arguments, (), ()),
        (
            "whole prompt, head size 60, bfloat16",
            bfloat16_sizes(PagedSizes(kv_lens=(63,), q_lens=(63,), h=8, g=1, d=60, v=48)),
            no_arguments,
            (),
            ("awkward",),
        ),
        ("window", chunk, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("soft cap", chunk, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("sinks, lse", chunk, lambda k: sinks_and_lse(k, chunk), ("softmax_aux",), ()),
        (
            "chunks, alibi and scales, lse",
            chunk,
            lambda k: chunk_size_and_scale_arguments(k, chunk),
            CHUNK_SIZE_FIELDS,
            (),
        ),
        ("score and mask functions, lse", chunk, functions_of_positions, ("score_mod", "mask_mod"), ()),
        ("model", model, no_arguments, (), ("bench",)),
        (
            "small model",
            PagedSizes(kv_lens=(256,), q_lens=(64,), h=8, g=2, d=64, v=64),
            no_arguments,
            (),
            ("bench_cpu",),
        ),
    )
    return make_cases_of_rows(record_type, prefill_inputs, rows)


def ragged_decode_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_decode_attention`."""
    plain = dataclasses.replace(DECODE_SIZES, s=129, v=48)
    wide = dataclasses.replace(SHARED_KV_HEAD_SIZES, s=70)
    model = PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, s=4096, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("ranges", plain, no_arguments, ("kv_starts",), ()),
        ("multi-query, head size 60", wide, no_arguments, (), ("awkward",)),
        ("window", plain, lambda k: {"sliding_window": (9, None)}, ("sliding_window",), ()),
        (
            "sinks and soft cap, lse",
            plain,
            lambda k: {**shared_sink_arguments(k), **LSE},
            ("softmax_aux", "logits_soft_cap"),
            (),
        ),
        (
            "chunks, alibi and scales, lse",
            plain,
            lambda k: chunk_size_and_scale_arguments(k, plain),
            CHUNK_SIZE_FIELDS,
            (),
        ),
        (
            "sinks by head, bfloat16",
            bfloat16_sizes(plain),
            lambda k: normal_arrays(k, jnp.float32, softmax_aux=(4, 2)),
            ("softmax_aux",),
            (),
        ),
        (
            "everything, bfloat16",
            dataclasses.replace(bfloat16_sizes(plain), d=64, v=64),
            lambda k: {**shared_sink_arguments(k), "sliding_window": (30, None)},
            ("kv_starts", "sliding_window", "softmax_aux", "logits_soft_cap"),
            (),
        ),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", dataclasses.replace(SMALL_DECODE_SIZES, s=512), no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, ragged_decode_inputs, rows)
