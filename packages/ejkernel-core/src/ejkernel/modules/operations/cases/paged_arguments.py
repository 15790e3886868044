"""The optional arguments of cases over paged caches: what is applied to scores, windows, prefixes and trees."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.paged_inputs import Arrays, PagedSizes, normal_arrays

LSE = {"return_lse": True}
WINDOW_AND_SOFT_CAP: dict[str, Any] = {"sliding_window": 5, "logits_soft_cap": 1.5}
TWO_SIDED_WINDOW_ARGUMENTS: dict[str, Any] = {"causal": False, "sliding_window": (9, 3)}


def no_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns an empty dictionary: the case has no further arguments."""
    return {}


def random_per_head(key: jax.Array, name: str, sizes: PagedSizes) -> Arrays:
    """Returns one normal number per query head."""
    return normal_arrays(key, jnp.float32, **{name: (sizes.h,)})


def sinks_and_lse(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns sinks, which are part of the lse that is returned."""
    return {**random_per_head(key, "softmax_aux", sizes), **LSE}


def bfloat16_sizes(sizes: PagedSizes) -> PagedSizes:
    """Returns the sizes with arrays of bfloat16."""
    return dataclasses.replace(sizes, dtype=jnp.bfloat16)


def slopes_and_qq_bias(key: jax.Array, sizes: PagedSizes) -> Arrays:
    """Returns ALiBi slopes and a bias of pairs of new tokens."""
    slopes, pairs = jax.random.split(key)
    return {**random_per_head(slopes, "alibi_slopes", sizes), **normal_arrays(pairs, jnp.float32, qq_bias=(16, 16))}


def masking_qq_bias(key: jax.Array) -> dict[str, Any]:
    """Returns a bias that hides pairs of new tokens with -inf, all of one query's among them."""
    terms, hides = jax.random.split(key)
    masked = jax.random.bernoulli(hides, 0.4, (16, 16)).at[5].set(True)
    bias = jnp.where(masked, -jnp.inf, normal_arrays(terms, jnp.float32, qq_bias=(16, 16))["qq_bias"])
    return {"qq_bias": bias, "logits_soft_cap": 1.5, **LSE}


def shared_prefix_and_sink_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a prefix that ends within a page, and sinks."""
    return {**random_per_head(key, "softmax_aux", sizes), "shared_prefix": jnp.int32(21)}


def chunk_size_and_scale_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns what combines with chunks of positions: scales of stored keys and values, and alibi."""
    return {**random_per_head(key, "alibi_slopes", sizes), "chunk_size": 9, "k_scale": 0.5, "v_scale": 3.0, **LSE}


CHUNK_SIZE_FIELDS = ("chunk_size", "alibi_slopes", "value_scale")


def tree_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree of new tokens for each sequence, with chunks and everything that combines with them."""
    terms, rest = jax.random.split(key)
    bias = normal_arrays(terms, jnp.float32, qq_bias=(len(sizes.kv_lens), 8, 8))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(rest, 0.3, bias.shape), -jnp.inf, bias)
    return {
        **chunk_size_and_scale_arguments(rest, sizes),
        **shared_prefix_and_sink_arguments(rest, sizes),
        "qq_bias": bias,
        "logits_soft_cap": 1.5,
    }


def packed_tree_arguments(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns a tree for each sequence of the size of its new tokens, over a shared prefix, with a window."""
    pairs = sum(rows * rows for rows in sizes.q_lens or ())
    terms, hidden = jax.random.split(key)
    bias = normal_arrays(terms, jnp.float32, qq_bias=(pairs,))["qq_bias"]
    bias = jnp.where(jax.random.bernoulli(hidden, 0.3, bias.shape), -jnp.inf, bias)
    return {"qq_bias": bias, "shared_prefix": jnp.int32(21), "sliding_window": 30, **LSE}


TREE_FIELDS = ("qq_bias", "shared_prefix", *CHUNK_SIZE_FIELDS, "softmax_aux", "logits_soft_cap")
PACKED_TREE_FIELDS = ("qq_bias", "shared_prefix", "sliding_window")


def with_float8_cache(make: Callable[[jax.Array, PagedSizes], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns inputs of an operation with caches of float8, keys and values divided by their scales."""

    def inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
        fields = make(key, dataclasses.replace(sizes, dtype=jnp.bfloat16))
        stored = {name: x.astype(jnp.float8_e4m3fn) for name, x in fields.items() if name in CACHE_FIELDS}
        return {**fields, **stored}

    return inputs


CACHE_FIELDS = ("key_cache", "value_cache", "key_buffer", "value_buffer", "keys", "values", "kv_pages")
"""Arguments that have the dtype of a cache."""

FLOAT8_SCALES = {"k_scale": 0.5, "v_scale": 3.0}


def shared_sink_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns sinks that all heads share, and a soft cap."""
    return {**normal_arrays(key, jnp.float32, softmax_aux=(3,)), "logits_soft_cap": 1.5}


def functions_of_positions(key: jax.Array) -> dict[str, Any]:
    """Returns functions that read arrays by sequence, head and key; some queries attend no key."""
    slopes, starts = jax.random.normal(key, (4,)), jax.random.randint(key, (5,), 0, 9)
    biases = jax.random.normal(key, (5, 9))

    def score_mod(score: Any, n: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
        return score - slopes[h] * jnp.minimum(q_pos - k_pos, 8) + biases[n, k_pos % 9]

    return {**LSE, "score_mod": score_mod, "mask_mod": lambda n, h, q_pos, k_pos: k_pos >= starts[n] + h}
