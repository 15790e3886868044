"""The named cases of the operations over paged caches, on which every backend is tested."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.paged_inputs import (
    Arrays,
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
LSE = {"return_lse": True}
MIXED_BATCH_SIZES = PagedSizes(kv_lens=(37, 1, 0, 64, 20), q_lens=(7, 1, 0, 1, 20), query_rows=33)
MODEL_MIXED_SIZES = PagedSizes(
    kv_lens=(4096, 2000, 1000, 3000), q_lens=(1021, 1, 1, 1), h=32, g=8, d=128, v=128, dtype=jnp.bfloat16
)
MODEL_UNUSED_SEQUENCE_SIZES = dataclasses.replace(
    MODEL_MIXED_SIZES, kv_lens=(*MODEL_MIXED_SIZES.kv_lens, 1), q_lens=(1021, 1, 1, 1, 0)
)
PREFIX_SIZES = PagedSizes(kv_lens=(37, 40, 50, 0), q_lens=(7, 1, 20, 0), query_rows=30)
SHARED_KV_HEAD_SIZES = PagedSizes(kv_lens=(70, 5), h=8, g=1, d=60, v=60, s=8)
_WINDOW_AND_SOFT_CAP: dict[str, Any] = {"sliding_window": 5, "logits_soft_cap": 1.5}
_TWO_SIDED_WINDOW_ARGUMENTS: dict[str, Any] = {"causal": False, "sliding_window": (9, 3)}


def no_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns an empty dictionary: the case has no further arguments."""
    return {}


def random_per_head(key: jax.Array, name: str, sizes: PagedSizes) -> Arrays:
    """Returns one normal number per query head."""
    return normal_arrays(key, jnp.float32, **{name: (sizes.h,)})


def _sinks_and_lse(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns sinks, which are part of the lse that is returned."""
    return {**random_per_head(key, "softmax_aux", sizes), **LSE}


def _bfloat16_sizes(sizes: PagedSizes) -> PagedSizes:
    return dataclasses.replace(sizes, dtype=jnp.bfloat16)


def _slopes_and_qq_bias(key: jax.Array, sizes: PagedSizes) -> Arrays:
    slopes, pairs = jax.random.split(key)
    return {**random_per_head(slopes, "alibi_slopes", sizes), **normal_arrays(pairs, jnp.float32, qq_bias=(16, 16))}


def _masking_qq_bias(key: jax.Array) -> dict[str, Any]:
    """Returns a bias that hides pairs of new tokens with -inf, all of one query's among them."""
    terms, hides = jax.random.split(key)
    masked = jax.random.bernoulli(hides, 0.4, (16, 16)).at[5].set(True)
    bias = jnp.where(masked, -jnp.inf, normal_arrays(terms, jnp.float32, qq_bias=(16, 16))["qq_bias"])
    return {"qq_bias": bias, "logits_soft_cap": 1.5, **LSE}


def _shared_prefix_and_sink_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a prefix that ends within a page, and sinks."""
    return {**random_per_head(key, "softmax_aux", sizes), "shared_prefix": jnp.int32(21)}


def _chunk_size_and_scale_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns what combines with chunks of positions: scales of stored keys and values, and alibi."""
    return {**random_per_head(key, "alibi_slopes", sizes), "chunk_size": 9, "k_scale": 0.5, "v_scale": 3.0, **LSE}


_CHUNK_SIZE_FIELDS = ("chunk_size", "alibi_slopes", "value_scale")


def _tree_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree of new tokens for each sequence, with chunks and everything that combines with them."""
    terms, rest = jax.random.split(key)
    bias = normal_arrays(terms, jnp.float32, qq_bias=(len(sizes.kv_lens), 8, 8))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(rest, 0.3, bias.shape), -jnp.inf, bias)
    return {
        **_chunk_size_and_scale_arguments(rest, sizes),
        **_shared_prefix_and_sink_arguments(rest, sizes),
        "qq_bias": bias,
        "logits_soft_cap": 1.5,
    }


def _packed_tree_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree for each sequence of the size of its new tokens, over a shared prefix, with a window."""
    pairs = sum(rows * rows for rows in sizes.q_lens or ())
    terms, hidden = jax.random.split(key)
    bias = normal_arrays(terms, jnp.float32, qq_bias=(pairs,))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(hidden, 0.3, bias.shape), -jnp.inf, bias)
    return {"qq_bias": bias, "shared_prefix": jnp.int32(21), "sliding_window": 30, **LSE}


_TREE_FIELDS = ("qq_bias", "shared_prefix", *_CHUNK_SIZE_FIELDS, "softmax_aux", "logits_soft_cap")
_PACKED_TREE_FIELDS = ("qq_bias", "shared_prefix", "sliding_window")
_SINKS_ROW: Row[PagedSizes] = (
    "sinks, lse, bfloat16",
    _bfloat16_sizes(MIXED_BATCH_SIZES),
    lambda k: _sinks_and_lse(k, MIXED_BATCH_SIZES),
    ("softmax_aux",),
    (),
)
_TREE_ROW: Row[PagedSizes] = (
    "a tree per sequence, and everything",
    PREFIX_SIZES,
    lambda k: _tree_arguments(k, PREFIX_SIZES),
    _TREE_FIELDS,
    ("awkward",),
)


def _with_float8_cache(make: Callable[[jax.Array, PagedSizes], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns inputs of an operation with caches of float8, keys and values divided by their scales."""

    def inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
        fields = make(key, dataclasses.replace(sizes, dtype=jnp.bfloat16))
        stored = {name: x.astype(jnp.float8_e4m3fn) for name, x in fields.items() if name in CACHE_FIELDS}
        return {**fields, **stored}

    return inputs


CACHE_FIELDS = ("key_cache", "value_cache", "key_buffer", "value_buffer", "keys", "values", "kv_pages")
"""Arguments that have the dtype of a cache."""

_FLOAT8_SCALES = {"k_scale": 0.5, "v_scale": 3.0}


def _shared_sink_arguments(key: jax.Array) -> dict[str, Any]:
    return {**normal_arrays(key, jnp.float32, softmax_aux=(3,)), "logits_soft_cap": 1.5}


def page_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `page_attention`."""
    short = PagedSizes(kv_lens=(64, 33), pages_per_table=9, dtype=jnp.bfloat16)
    model = PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", DECODE_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", SHARED_KV_HEAD_SIZES, no_arguments, (), ("awkward",)),
        ("one key, values wider", PagedSizes(kv_lens=(1,), g=4, v=48, s=1), no_arguments, (), ("awkward",)),
        ("window", DECODE_SIZES, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("sinks, lse", DECODE_SIZES, lambda k: _sinks_and_lse(k, DECODE_SIZES), ("softmax_aux",), ()),
        ("soft cap", DECODE_SIZES, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        (
            "chunks, alibi and scales, lse",
            DECODE_SIZES,
            lambda k: _chunk_size_and_scale_arguments(k, DECODE_SIZES),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
        ("wide table, bfloat16", short, lambda k: {"max_context_len": 70}, (), ()),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", SMALL_DECODE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    common = PagedSizes(kv_lens=(37, 40, 50, 0))
    eight: tuple[Row[PagedSizes], ...] = (
        (
            "float8, scales and shared prefix",
            common,
            lambda k: {**_shared_prefix_and_sink_arguments(k, common), **_FLOAT8_SCALES},
            ("shared_prefix", "value_scale", "softmax_aux"),
            (),
        ),
    )
    return (
        *make_cases_of_rows(record_type, page_inputs, rows),
        *make_cases_of_rows(record_type, _with_float8_cache(page_inputs), eight),
    )


def unified_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `unified_attention`."""
    long = PagedSizes(kv_lens=(129, 40), q_lens=(63, 40), h=8, g=1, d=60, v=48)
    both = ("alibi_slopes", "qq_bias", "logits_soft_cap")
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        ("window", MIXED_BATCH_SIZES, lambda k: {"sliding_window": 5}, ("sliding_window",), ()),
        ("not causal, window on both sides", MIXED_BATCH_SIZES, lambda k: _TWO_SIDED_WINDOW_ARGUMENTS, ("causal",), ()),
        (
            "biases and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: {**_slopes_and_qq_bias(k, MIXED_BATCH_SIZES), "logits_soft_cap": 1.5},
            both,
            (),
        ),
        ("qq_bias of -inf and soft cap, lse", MIXED_BATCH_SIZES, _masking_qq_bias, both[1:], ("awkward",)),
        _SINKS_ROW,
        (
            "shared prefix, sinks",
            PREFIX_SIZES,
            lambda k: _shared_prefix_and_sink_arguments(k, PREFIX_SIZES),
            ("shared_prefix", "softmax_aux"),
            (),
        ),
        _TREE_ROW,
        (
            "packed trees, shared prefix, window",
            PREFIX_SIZES,
            lambda k: _packed_tree_arguments(k, PREFIX_SIZES),
            _PACKED_TREE_FIELDS,
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
            lambda k: _WINDOW_AND_SOFT_CAP,
            ("sliding_window", "logits_soft_cap"),
            (),
        ),
        _SINKS_ROW,
        (
            "chunks, alibi and scales, lse",
            MIXED_BATCH_SIZES,
            lambda k: _chunk_size_and_scale_arguments(k, MIXED_BATCH_SIZES),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
        ("rounded operands", MIXED_BATCH_SIZES, lambda k: {"compute_dtype": jnp.bfloat16}, ("compute_dtype",), ()),
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
        ("window and soft cap", wide, lambda k: _WINDOW_AND_SOFT_CAP, ("sliding_window", "logits_soft_cap"), ()),
        ("head size 64, sinks, lse", small, lambda k: _sinks_and_lse(k, small), ("softmax_aux",), ()),
        ("scales", small, lambda k: scaled, ("value_scale",), ()),
        (
            "chunks, alibi and scales, lse",
            wide,
            lambda k: _chunk_size_and_scale_arguments(k, wide),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
        ("model", MODEL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    halved: tuple[Row[PagedSizes], ...] = (
        ("head size 64 in lanes, bfloat16", _bfloat16_sizes(small), lambda k: {"softmax_scale": None}, (), ()),
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
            lambda k: _TWO_SIDED_WINDOW_ARGUMENTS,
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
    return {
        name: value for name, value in _chunk_size_and_scale_arguments(key, DECODE_SIZES).items() if name not in LSE
    }


def decode_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `decode_attention`."""
    model = PagedSizes(kv_lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows_of_tokens = PagedSizes(kv_lens=(19, 0, 5), h=4, g=4, s=1, v=48)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", DECODE_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", SHARED_KV_HEAD_SIZES, no_arguments, (), ("awkward",)),
        ("rows of tokens, soft cap", rows_of_tokens, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("window", DECODE_SIZES, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("chunks, alibi and scales", DECODE_SIZES, _decode_chunk_arguments, _CHUNK_SIZE_FIELDS, ()),
        (
            "sinks, bfloat16",
            _bfloat16_sizes(DECODE_SIZES),
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
            _bfloat16_sizes(PagedSizes(kv_lens=(63,), q_lens=(63,), h=8, g=1, d=60, v=48)),
            no_arguments,
            (),
            ("awkward",),
        ),
        ("window", chunk, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("soft cap", chunk, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("sinks, lse", chunk, lambda k: _sinks_and_lse(k, chunk), ("softmax_aux",), ()),
        (
            "chunks, alibi and scales, lse",
            chunk,
            lambda k: _chunk_size_and_scale_arguments(k, chunk),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
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
            lambda k: {**_shared_sink_arguments(k), **LSE},
            ("softmax_aux", "logits_soft_cap"),
            (),
        ),
        (
            "chunks, alibi and scales, lse",
            plain,
            lambda k: _chunk_size_and_scale_arguments(k, plain),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
        (
            "sinks by head, bfloat16",
            _bfloat16_sizes(plain),
            lambda k: normal_arrays(k, jnp.float32, softmax_aux=(4, 2)),
            ("softmax_aux",),
            (),
        ),
        (
            "everything, bfloat16",
            dataclasses.replace(_bfloat16_sizes(plain), d=64, v=64),
            lambda k: {**_shared_sink_arguments(k), "sliding_window": (30, None)},
            ("kv_starts", "sliding_window", "softmax_aux", "logits_soft_cap"),
            (),
        ),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", dataclasses.replace(SMALL_DECODE_SIZES, s=512), no_arguments, (), ("bench_cpu",)),
    )
    return make_cases_of_rows(record_type, ragged_decode_inputs, rows)
