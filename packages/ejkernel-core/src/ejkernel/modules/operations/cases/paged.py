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
    chunked_inputs,
    decode_inputs,
    dense_inputs,
    normal,
    packed_inputs,
    page_inputs,
    prefill_inputs,
    v2_inputs,
    v3_eight_bits,
    v3_inputs,
    v3_integers,
)
from ejkernel.modules.operations.cases.tables import Row, table
from ejkernel.ops.model import Case

PLAIN = PagedSizes()
SMALL_DECODE_SIZES = PagedSizes(lens=(500, 400, 300, 200), h=8, g=2, d=64, v=64)
SMALL_MIXED_SIZES = PagedSizes(lens=(256, 150, 50, 200), q_lens=(29, 1, 1, 1), h=8, g=2, d=64, v=64)
SMALL_UNUSED_SEQUENCE_SIZES = PagedSizes(lens=(256, 150, 50, 200, 1), q_lens=(29, 1, 1, 1, 0), h=8, g=2, d=128, v=128)
LSE = {"return_lse": True}
MIXED_BATCH_SIZES = PagedSizes(lens=(37, 1, 0, 64, 20), q_lens=(7, 1, 0, 1, 20), rows=33)
MODEL_MIXED_SIZES = PagedSizes(
    lens=(4096, 2000, 1000, 3000), q_lens=(1021, 1, 1, 1), h=32, g=8, d=128, v=128, dtype=jnp.bfloat16
)
MODEL_UNUSED_SEQUENCE_SIZES = dataclasses.replace(
    MODEL_MIXED_SIZES, lens=(*MODEL_MIXED_SIZES.lens, 1), q_lens=(1021, 1, 1, 1, 0)
)
PREFIX_SIZES = PagedSizes(lens=(37, 40, 50, 0), q_lens=(7, 1, 20, 0), rows=30)
WIDE = PagedSizes(lens=(70, 5), h=8, g=1, d=60, v=60, s=8)
_WINDOW_AND_SOFT_CAP: dict[str, Any] = {"sliding_window": 5, "logits_soft_cap": 1.5}
_BAND_ARGUMENTS: dict[str, Any] = {"causal": False, "sliding_window": (9, 3)}


def no_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns an empty dictionary: the case has no further arguments."""
    return {}


def per_head(key: jax.Array, name: str, sizes: PagedSizes) -> Arrays:
    """Returns one normal number per query head."""
    return normal(key, jnp.float32, **{name: (sizes.h,)})


def _sinks_lse(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns sinks, which are part of the lse that is returned."""
    return {**per_head(key, "softmax_aux", sizes), **LSE}


def _half_precision(sizes: PagedSizes) -> PagedSizes:
    return dataclasses.replace(sizes, dtype=jnp.bfloat16)


def _slopes_and_qq_bias(key: jax.Array, sizes: PagedSizes) -> Arrays:
    slopes, pairs = jax.random.split(key)
    return {**per_head(slopes, "alibi_slopes", sizes), **normal(pairs, jnp.float32, qq_bias=(16, 16))}


def _masking_pairs(key: jax.Array) -> dict[str, Any]:
    """Returns a bias that hides pairs of new tokens with -inf, all of one query's among them."""
    terms, hides = jax.random.split(key)
    masked = jax.random.bernoulli(hides, 0.4, (16, 16)).at[5].set(True)
    bias = jnp.where(masked, -jnp.inf, normal(terms, jnp.float32, qq_bias=(16, 16))["qq_bias"])
    return {"qq_bias": bias, "logits_soft_cap": 1.5, **LSE}


def _shared_prefix_and_sinks(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a prefix that ends within a page, and sinks."""
    return {**per_head(key, "softmax_aux", sizes), "shared_prefix": jnp.int32(21)}


def _chunk_size_with_scales(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns what combines with chunks of positions: scales of stored keys and values, and alibi."""
    return {**per_head(key, "alibi_slopes", sizes), "chunk_size": 9, "k_scale": 0.5, "v_scale": 3.0, **LSE}


_CHUNK_SIZE_FIELDS = ("chunk_size", "alibi_slopes", "value_scale")


def _tree_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree of new tokens for each sequence, with chunks and everything that combines with them."""
    terms, rest = jax.random.split(key)
    bias = normal(terms, jnp.float32, qq_bias=(len(sizes.lens), 8, 8))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(rest, 0.3, bias.shape), -jnp.inf, bias)
    return {
        **_chunk_size_with_scales(rest, sizes),
        **_shared_prefix_and_sinks(rest, sizes),
        "qq_bias": bias,
        "logits_soft_cap": 1.5,
    }


def _packed_trees(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree for each sequence of the size of its new tokens, over a shared prefix, with a window."""
    pairs = sum(rows * rows for rows in sizes.q_lens or ())
    terms, hidden = jax.random.split(key)
    bias = normal(terms, jnp.float32, qq_bias=(pairs,))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(hidden, 0.3, bias.shape), -jnp.inf, bias)
    return {"qq_bias": bias, "shared_prefix": jnp.int32(21), "sliding_window": 30, **LSE}


_TREE_FIELDS = ("qq_bias", "shared_prefix", *_CHUNK_SIZE_FIELDS, "softmax_aux", "logits_soft_cap")
_PACKED = ("qq_bias", "shared_prefix", "sliding_window")
_SINKS_ROW: Row[PagedSizes] = (
    "sinks, lse, bfloat16",
    _half_precision(MIXED_BATCH_SIZES),
    lambda k: _sinks_lse(k, MIXED_BATCH_SIZES),
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


def _eight_bits(make: Callable[[jax.Array, PagedSizes], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns inputs of an operation with caches of float8, keys and values divided by their scales."""

    def inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
        fields = make(key, dataclasses.replace(sizes, dtype=jnp.bfloat16))
        stored = {name: x.astype(jnp.float8_e4m3fn) for name, x in fields.items() if name in CACHE_FIELDS}
        return {**fields, **stored}

    return inputs


CACHE_FIELDS = ("key_cache", "value_cache", "key_buffer", "value_buffer", "keys", "values", "kv_pages")
"""Arguments that have the dtype of a cache."""

_FLOAT8_SCALES = {"k_scale": 0.5, "v_scale": 3.0}


def _shared_sinks(key: jax.Array) -> dict[str, Any]:
    return {**normal(key, jnp.float32, softmax_aux=(3,)), "logits_soft_cap": 1.5}


def page_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `page_attention`."""
    short = PagedSizes(lens=(64, 33), table=9, dtype=jnp.bfloat16)
    model = PagedSizes(lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", PLAIN, no_arguments, (), ()),
        ("multi-query, head size 60", WIDE, no_arguments, (), ("awkward",)),
        ("one key, values wider", PagedSizes(lens=(1,), g=4, v=48, s=1), no_arguments, (), ("awkward",)),
        ("window", PLAIN, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("sinks, lse", PLAIN, lambda k: _sinks_lse(k, PLAIN), ("softmax_aux",), ()),
        ("soft cap", PLAIN, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("chunks, alibi and scales, lse", PLAIN, lambda k: _chunk_size_with_scales(k, PLAIN), _CHUNK_SIZE_FIELDS, ()),
        ("wide table, bfloat16", short, lambda k: {"max_context_len": 70}, (), ()),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", SMALL_DECODE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    common = PagedSizes(lens=(37, 40, 50, 0))
    eight: tuple[Row[PagedSizes], ...] = (
        (
            "float8, scales and shared prefix",
            common,
            lambda k: {**_shared_prefix_and_sinks(k, common), **_FLOAT8_SCALES},
            ("shared_prefix", "value_scale", "softmax_aux"),
            (),
        ),
    )
    return (*table(arguments, page_inputs, rows), *table(arguments, _eight_bits(page_inputs), eight))


def unified_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `unified_attention`."""
    long = PagedSizes(lens=(129, 40), q_lens=(63, 40), h=8, g=1, d=60, v=48)
    both = ("alibi_slopes", "qq_bias", "logits_soft_cap")
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, (), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        ("window", MIXED_BATCH_SIZES, lambda k: {"sliding_window": 5}, ("sliding_window",), ()),
        ("not causal, window on both sides", MIXED_BATCH_SIZES, lambda k: _BAND_ARGUMENTS, ("causal",), ()),
        (
            "biases and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: {**_slopes_and_qq_bias(k, MIXED_BATCH_SIZES), "logits_soft_cap": 1.5},
            both,
            (),
        ),
        ("qq_bias of -inf and soft cap, lse", MIXED_BATCH_SIZES, _masking_pairs, both[1:], ("awkward",)),
        _SINKS_ROW,
        (
            "shared prefix, sinks",
            PREFIX_SIZES,
            lambda k: _shared_prefix_and_sinks(k, PREFIX_SIZES),
            ("shared_prefix", "softmax_aux"),
            (),
        ),
        _TREE_ROW,
        ("packed trees, shared prefix, window", PREFIX_SIZES, lambda k: _packed_trees(k, PREFIX_SIZES), _PACKED, ()),
        ("model", MODEL_MIXED_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_MIXED_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, packed_inputs, rows)


def v2_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v2`."""
    long = PagedSizes(lens=(129, 40, 9), q_lens=(63, 40, 9), h=8, g=1, d=60, v=60)
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
            lambda k: _chunk_size_with_scales(k, MIXED_BATCH_SIZES),
            _CHUNK_SIZE_FIELDS,
            (),
        ),
        ("rounded operands", MIXED_BATCH_SIZES, lambda k: {"compute_dtype": jnp.bfloat16}, ("compute_dtype",), ()),
        ("model", MODEL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, v2_inputs, rows)


def v3_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_page_attention_v3`."""
    small = PagedSizes(lens=(37, 1, 20), q_lens=(7, 1, 20), rows=30, h=4, g=2, d=64, s=8)
    wide = dataclasses.replace(small, d=128)
    scaled = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0, "softmax_scale": None}
    plain = ("new_keys", "new_values", "num_seqs")
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", wide, lambda k: {"softmax_scale": 0.1}, plain, ()),
        ("window and soft cap", wide, lambda k: _WINDOW_AND_SOFT_CAP, ("sliding_window", "logits_soft_cap"), ()),
        ("head size 64, sinks, lse", small, lambda k: _sinks_lse(k, small), ("softmax_aux",), ()),
        ("scales", small, lambda k: scaled, ("value_scale",), ()),
        ("chunks, alibi and scales, lse", wide, lambda k: _chunk_size_with_scales(k, wide), _CHUNK_SIZE_FIELDS, ()),
        ("model", MODEL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_UNUSED_SEQUENCE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    halved: tuple[Row[PagedSizes], ...] = (
        ("head size 64 in lanes, bfloat16", _half_precision(small), lambda k: {"softmax_scale": None}, (), ()),
    )
    odd = dataclasses.replace(small, h=3, g=3)
    integers = {"q_scale": 0.03, "k_scale": 0.01, "v_scale": 0.02, "softmax_scale": None}
    eight: tuple[Row[PagedSizes], ...] = (("int8, scales", wide, lambda k: integers, ("value_scale",), ()),)
    padded: tuple[Row[PagedSizes], ...] = (
        ("padded heads, float8", odd, lambda k: {"softmax_scale": None}, ("kv_heads",), ("awkward",)),
    )
    return (
        *table(arguments, v3_inputs, rows),
        *table(arguments, functools.partial(v3_inputs, lanes=True), halved),
        *table(arguments, v3_eight_bits, padded),
        *table(arguments, v3_integers, eight),
    )


def chunked_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `chunked_prefill_paged_decode`."""
    long = PagedSizes(lens=(70, 40), q_lens=(63, 40), h=8, g=1, d=60, v=48)
    capped = {"logits_soft_cap": 1.5}
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", MIXED_BATCH_SIZES, no_arguments, ("new_keys", "new_values"), ()),
        ("multi-query, head size 60", long, no_arguments, (), ("awkward",)),
        (
            "not causal, window on both sides",
            MIXED_BATCH_SIZES,
            lambda k: _BAND_ARGUMENTS,
            ("causal", "sliding_window"),
            (),
        ),
        (
            "alibi and soft cap",
            MIXED_BATCH_SIZES,
            lambda k: {**per_head(k, "alibi_slopes", MIXED_BATCH_SIZES), **capped},
            ("alibi_slopes", "logits_soft_cap"),
            (),
        ),
        _TREE_ROW,
        _SINKS_ROW,
        ("model", MODEL_MIXED_SIZES, no_arguments, (), ("bench",)),
        ("small model", SMALL_MIXED_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, chunked_inputs, rows)


def _decode_chunks(key: jax.Array) -> dict[str, Any]:
    return {name: value for name, value in _chunk_size_with_scales(key, PLAIN).items() if name not in LSE}


def decode_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `decode_attention`."""
    model = PagedSizes(lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows_of_tokens = PagedSizes(lens=(19, 0, 5), h=4, g=4, s=1, v=48)
    rows: tuple[Row[PagedSizes], ...] = (
        ("lengths 0 to 64", PLAIN, no_arguments, (), ()),
        ("multi-query, head size 60", WIDE, no_arguments, (), ("awkward",)),
        ("rows of tokens, soft cap", rows_of_tokens, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("window", PLAIN, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("chunks, alibi and scales", PLAIN, _decode_chunks, _CHUNK_SIZE_FIELDS, ()),
        ("sinks, bfloat16", _half_precision(PLAIN), lambda k: per_head(k, "softmax_aux", PLAIN), ("softmax_aux",), ()),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", SMALL_DECODE_SIZES, no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, decode_inputs, rows)


def prefill_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `prefill_page_attention`."""
    chunk = PagedSizes(lens=(70,), q_lens=(23,), table=7)
    model = PagedSizes(lens=(4096,), q_lens=(1024,), h=32, g=8, d=128, v=128, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("chunk", chunk, no_arguments, (), ()),
        (
            "whole prompt, head size 60, bfloat16",
            _half_precision(PagedSizes(lens=(63,), q_lens=(63,), h=8, g=1, d=60, v=48)),
            no_arguments,
            (),
            ("awkward",),
        ),
        ("window", chunk, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
        ("soft cap", chunk, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
        ("sinks, lse", chunk, lambda k: _sinks_lse(k, chunk), ("softmax_aux",), ()),
        ("chunks, alibi and scales, lse", chunk, lambda k: _chunk_size_with_scales(k, chunk), _CHUNK_SIZE_FIELDS, ()),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", PagedSizes(lens=(256,), q_lens=(64,), h=8, g=2, d=64, v=64), no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, prefill_inputs, rows)


def dense_cases(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `ragged_decode_attention`."""
    plain = dataclasses.replace(PLAIN, s=129, v=48)
    wide = dataclasses.replace(WIDE, s=70)
    model = PagedSizes(lens=(4000, 3000, 2000, 1000) * 4, h=32, g=8, d=128, v=128, s=4096, dtype=jnp.bfloat16)
    rows: tuple[Row[PagedSizes], ...] = (
        ("ranges", plain, no_arguments, ("kv_starts",), ()),
        ("multi-query, head size 60", wide, no_arguments, (), ("awkward",)),
        ("window", plain, lambda k: {"sliding_window": (9, None)}, ("sliding_window",), ()),
        (
            "sinks and soft cap, lse",
            plain,
            lambda k: {**_shared_sinks(k), **LSE},
            ("softmax_aux", "logits_soft_cap"),
            (),
        ),
        ("chunks, alibi and scales, lse", plain, lambda k: _chunk_size_with_scales(k, plain), _CHUNK_SIZE_FIELDS, ()),
        (
            "sinks by head, bfloat16",
            _half_precision(plain),
            lambda k: normal(k, jnp.float32, softmax_aux=(4, 2)),
            ("softmax_aux",),
            (),
        ),
        (
            "everything, bfloat16",
            dataclasses.replace(_half_precision(plain), d=64, v=64),
            lambda k: {**_shared_sinks(k), "sliding_window": (30, None)},
            ("kv_starts", "sliding_window", "softmax_aux", "logits_soft_cap"),
            (),
        ),
        ("model", model, no_arguments, (), ("bench",)),
        ("small model", dataclasses.replace(SMALL_DECODE_SIZES, s=512), no_arguments, (), ("bench_cpu",)),
    )
    return table(arguments, dense_inputs, rows)
