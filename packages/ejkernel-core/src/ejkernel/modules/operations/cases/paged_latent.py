"""The named cases of the operations over paged caches of latent vectors, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes, normal_arrays
from ejkernel.modules.operations.cases.paged_inputs import make_inputs as make_paged_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case


def make_base_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns the arguments; `sizes.v` is R and `sizes.d` is Dr. The last sequence has a length but is not live."""
    z, pack = sizes, 4 // jnp.dtype(sizes.dtype).itemsize
    lanes = cdiv(z.v, 128) * 128 + cdiv(z.d, 128) * 128
    shapes = {
        "queries_nope": (z.num_query_rows, z.h, z.v),
        "queries_pe": (z.num_query_rows, z.h, z.d),
        "keys_values": (z.num_query_rows, z.v),
        "keys_pe": (z.num_query_rows, z.d),
        "kv_cache": (z.num_pages, z.s // pack, pack, lanes),
    }
    return {
        **normal_arrays(key, z.dtype, **shapes),
        "kv_lens": jnp.array(z.kv_lens, jnp.int32),
        "block_tables": jnp.asarray(z.block_tables().reshape(-1)),
        "query_start_loc": jnp.asarray(z.query_start_loc()),
        "distribution": jnp.array([0, 0, len(z.kv_lens) - 1], jnp.int32),
    }


def int8_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns the same with a cache of int8 and queries of 16 bits."""
    fields = make_base_inputs(key, dataclasses.replace(sizes, dtype=jnp.int8))
    stored = ("keys_values", "keys_pe", "kv_cache")
    integer_fields = {
        name: jax.random.randint(k, fields[name].shape, -128, 128).astype(jnp.int8)
        for name, k in zip(stored, jax.random.split(key, len(stored)), strict=True)
    }
    queries = {name: fields[name].shape for name in ("queries_nope", "queries_pe")}
    return {**fields, **integer_fields, **normal_arrays(key, jnp.bfloat16, **queries)}


def float8_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns the same with a cache of float8_e4m3fn, whose numbers are up to 4 times as large as what
    they stand for.
    """
    fields = make_base_inputs(key, dataclasses.replace(sizes, dtype=jnp.bfloat16))
    pages, slots, lanes = fields["kv_cache"].shape[0], sizes.s, fields["kv_cache"].shape[-1]
    stored = {name: (4 * fields[name]).astype(jnp.float8_e4m3fn) for name in ("keys_values", "keys_pe", "kv_cache")}
    stored["kv_cache"] = stored["kv_cache"].reshape(pages, slots // 4, 4, lanes)
    return {**fields, **stored}


SMALL_SIZES = PagedSizes(kv_lens=(37, 1, 20), q_lens=(7, 1, 20), query_rows=30, h=4, s=8, v=60, d=17)
HALF_PRECISION_SIZES = dataclasses.replace(SMALL_SIZES, h=96, v=128, d=64, dtype=jnp.bfloat16)
MODEL_SIZES = PagedSizes(
    kv_lens=(4096, 2000, 1000, 3000, 1), q_lens=(1021, 1, 1, 1, 0), h=16, s=64, v=512, d=64, dtype=jnp.bfloat16
)
SMALL_MODEL_SIZES = PagedSizes(kv_lens=(256, 150, 50, 200, 1), q_lens=(29, 1, 1, 1, 0), h=4, s=16, v=128, d=32)
LSE = {"return_lse": True}
SCALE_ARGUMENTS = {"q_scale": 0.03, "k_scale": 0.01, "v_scale": 0.02, "softmax_scale": 0.1}
QUARTER_SCALES = {"k_scale": 0.25, "v_scale": 0.25}
_TREE_FIELDS = ("qq_bias", "softmax_aux", "alibi_slopes", "chunk_size")
WINDOW_AND_SOFT_CAP: dict[str, Any] = {"sliding_window": 5, "logits_soft_cap": 1.5}


_TIMED_ROWS: tuple[Row[PagedSizes], ...] = (
    ("model", MODEL_SIZES, lambda k: {"softmax_scale": 192**-0.5}, (), ("bench",)),
    ("small model", SMALL_MODEL_SIZES, lambda k: {"softmax_scale": 96**-0.5}, (), ("bench_cpu",)),
)


def _tree_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns a tree of new tokens for each sequence, with sinks, alibi and chunks."""
    results = normal_arrays(
        key,
        jnp.float32,
        qq_bias=(len(SMALL_SIZES.kv_lens), 8, 8),
        softmax_aux=(SMALL_SIZES.h,),
        alibi_slopes=(SMALL_SIZES.h,),
    )
    return {**results, "chunk_size": 9, **LSE}


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `multi_latent_ragged_page_attention`."""
    rows: tuple[Row[PagedSizes], ...] = (
        ("prefill and decode", SMALL_SIZES, lambda k: {}, ("latent", "new_keys", "num_seqs"), ("awkward",)),
        (
            "window and soft cap, bfloat16",
            HALF_PRECISION_SIZES,
            lambda k: WINDOW_AND_SOFT_CAP,
            ("sliding_window", "logits_soft_cap"),
            (),
        ),
        ("a tree per sequence, sinks, alibi, chunks, lse", SMALL_SIZES, _tree_arguments, _TREE_FIELDS, ()),
        *_TIMED_ROWS,
    )
    eight: tuple[Row[PagedSizes], ...] = (
        ("int8, scales, lse", SMALL_SIZES, lambda k: {**SCALE_ARGUMENTS, **LSE}, ("value_scale",), ()),
    )
    float8: tuple[Row[PagedSizes], ...] = (
        ("float8_e4m3fn, scales", SMALL_SIZES, lambda k: QUARTER_SCALES, ("value_scale",), ()),
    )
    return (
        *make_cases_of_rows(record_type, make_base_inputs, rows),
        *make_cases_of_rows(record_type, int8_inputs, eight),
        *make_cases_of_rows(record_type, float8_inputs, float8),
    )


def cases_v2(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `multi_latent_ragged_page_attention_v2`, which is the same but for its configuration."""
    every = ("latent", "new_keys", "num_seqs", "sliding_window", "logits_soft_cap", "value_scale")
    rows: tuple[Row[PagedSizes], ...] = (
        ("int8, everything, lse", SMALL_SIZES, lambda k: {**WINDOW_AND_SOFT_CAP, **SCALE_ARGUMENTS, **LSE}, every, ()),
    )
    return (
        *make_cases_of_rows(record_type, int8_inputs, rows),
        *make_cases_of_rows(record_type, make_base_inputs, _TIMED_ROWS),
    )


make_inputs = functools.partial(
    make_paged_inputs,
    cache_size=lambda args: (args.kv_cache.shape[0], args.kv_cache.shape[1] * args.kv_cache.shape[2]),
)
