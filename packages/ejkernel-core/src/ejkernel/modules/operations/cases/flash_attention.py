"""Inputs for `flash_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.pair_functions import rows_with_functions
from ejkernel.modules.operations.cases.tables import (
    Row,
    even_cu_seqlens,
    fill_arguments,
    fill_function,
    fill_mask_info,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Shape of a call: batch, queries, keys, query heads, KV heads, head size, value size."""

    b: int = 2
    t: int = 63
    s: int = 63
    h: int = 4
    g: int = 2
    d: int = 32
    v: int = 32
    dtype: Any = jnp.float32


def qkv(key: jax.Array, sizes: AttentionSizes) -> dict[str, jax.Array]:
    """Returns normal query, key and value."""
    z = sizes
    shapes = {"query": (z.b, z.t, z.h, z.d), "key": (z.b, z.s, z.g, z.d), "value": (z.b, z.s, z.g, z.v)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape, jnp.float32).astype(z.dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def timed_case_rows(tokens: int = 4096) -> tuple[Row[AttentionSizes], ...]:
    """Returns the causal calls that are timed: one of a model with so many tokens on accelerators, and a small one on
    CPUs.
    """
    large = AttentionSizes(b=1, t=tokens, s=tokens, h=16, g=4, d=128, v=128, dtype=jnp.bfloat16)
    small = AttentionSizes(b=1, t=512, s=512, h=8, g=2, d=64, v=64)
    return (
        ("model", large, lambda k: {"causal": True}, (), ("bench",)),
        ("small model", small, lambda k: {"causal": True}, (), ("bench_cpu",)),
    )


def _segment_ids_of_lengths(lengths: tuple[int, ...], total: int) -> list[int]:
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    return ids + [-1] * (total - len(ids))


def _segment_arguments(sizes: AttentionSizes) -> dict[str, Any]:
    rows = [_segment_ids_of_lengths((20, 30), sizes.t), _segment_ids_of_lengths((7, 40, 16), sizes.t)]
    return {"mask_info": MaskInfo.from_segments(jnp.array(rows[: sizes.b], jnp.int32))}


def _mask_and_bias_arguments(key: jax.Array, sizes: AttentionSizes) -> dict[str, Any]:
    mask = jax.random.bernoulli(key, 0.6, (sizes.b, 1, sizes.t, sizes.s)).at[:, :, 3].set(False)
    return {"mask_info": MaskInfo(_attention_mask=mask)}


def _mask_of_real_keys(key: jax.Array, sizes: AttentionSizes) -> jax.Array:
    """Returns a mask of keys, [B, S], with padding at the end."""
    return jnp.arange(sizes.s) < jax.random.randint(key, (sizes.b, 1), 20, sizes.s)


def _position_arguments(key: jax.Array, sizes: AttentionSizes) -> dict[str, Any]:
    q = jax.random.randint(key, (sizes.b, sizes.t), 0, sizes.s)
    return {
        "mask_info": MaskInfo(q_positions=q, kv_positions=jnp.arange(sizes.s)[None].repeat(sizes.b, 0)),
        "causal": True,
    }


def _extreme_positions(key: jax.Array, sizes: AttentionSizes) -> dict[str, Any]:
    """Returns positions of tokens among ones at the ends of int32, from where differences and sums
    would wrap around.
    """
    ends = jnp.array([jnp.iinfo(jnp.int32).max, jnp.iinfo(jnp.int32).min, -1])
    queries, keys = (jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (sizes.b, n)) for n in (sizes.t, sizes.s))
    queries = queries.at[:, 5::9].set(jax.random.choice(key, ends, (sizes.b, len(range(5, sizes.t, 9)))))
    return {"mask_info": MaskInfo(q_positions=queries, kv_positions=keys.at[:, 3::11].set(ends[0]))}


def _masking_bias(key: jax.Array, sizes: AttentionSizes) -> dict[str, Any]:
    """Returns a bias that hides pairs, whole rows and a whole column with -inf."""
    terms, mask_key = jax.random.split(key)
    bias = _bias_argument(terms, (1, sizes.h, sizes.t, sizes.s), sizes.dtype)["bias"]
    masked = jax.random.bernoulli(mask_key, 0.3, bias.shape).at[:, :, 4].set(True).at[:, 1, :, 7].set(True)
    return {"bias": jnp.where(masked, -jnp.inf, bias)}


def _bias_argument(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"bias": jax.random.normal(key, shape, jnp.float32).astype(dtype)}


def _sink_argument(key: jax.Array, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"softmax_aux": jax.random.normal(key, shape, jnp.float32)}


def _dropout_arguments(prob: float = 0.3) -> dict[str, Any]:
    return {"dropout_prob": prob, "dropout_seed": jnp.uint32(7)}


def exact_scores_inputs(key: jax.Array, sizes: AttentionSizes) -> dict[str, Any]:
    """Returns queries and keys on a grid, whose scores are exact: coarse logits are then rounded alike in any order of
    sums.
    """
    arrays = qkv(key, sizes)
    return {**{name: jnp.round(arrays[name] * 16) / 16 for name in ("query", "key")}, "softmax_scale": 0.25}


LSE = {"return_lse": True}
PLAIN_SIZES = AttentionSizes()
PACKED_SIZES = AttentionSizes(b=1, t=129, s=129)
CROSS_SIZES = AttentionSizes(t=40, s=63)
HALF_PRECISION_SIZES = AttentionSizes(t=128, s=128, d=64, v=64, dtype=jnp.bfloat16)
LONG_KEYS_SIZES = AttentionSizes(b=1, t=24, s=2801, h=2, g=1, d=64, v=64, dtype=jnp.bfloat16)
LONG_QUERIES_SIZES = AttentionSizes(b=1, t=2001, s=150, h=2, g=1, d=128, v=128, dtype=jnp.bfloat16)
LARGE_HEAD_DIM_SIZES = AttentionSizes(b=1, t=72, s=72, h=2, g=1, d=256, v=256, dtype=jnp.bfloat16)
LATENT_SIZES = AttentionSizes(b=1, t=140, s=140, h=2, g=1, d=192, v=128, dtype=jnp.bfloat16)
_SEGMENT_FIELDS = ("q_segment_ids", "kv_segment_ids")
_POSITION_FIELDS = ("q_positions", "kv_positions")

_CASE_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("plain", PLAIN_SIZES, lambda k: {}, (), ()),
    ("one token", AttentionSizes(b=1, t=1, s=1), lambda k: {}, (), ("awkward",)),
    ("one query", AttentionSizes(t=1, s=129), lambda k: {}, (), ("awkward",)),
    ("cross, head size 60", AttentionSizes(t=40, s=129, d=60, v=60), lambda k: {}, (), ("awkward",)),
    ("multi-query, values wider", AttentionSizes(g=1, v=48), lambda k: {"causal": True}, ("causal",), ("awkward",)),
    ("causal", AttentionSizes(t=129, s=129), lambda k: {"causal": True}, ("causal",), ()),
    ("causal, more queries", AttentionSizes(t=63, s=40), lambda k: {"causal": True}, ("causal",), ("awkward",)),
    ("window", PLAIN_SIZES, lambda k: {"sliding_window": 9}, ("sliding_window",), ()),
    ("window, one side open", PLAIN_SIZES, lambda k: {"sliding_window": (None, 3)}, ("sliding_window",), ("awkward",)),
    ("window of the diagonal", PLAIN_SIZES, lambda k: {"sliding_window": (0, 0)}, ("sliding_window",), ("awkward",)),
    (
        "causal window",
        PLAIN_SIZES,
        lambda k: {"sliding_window": (17, 4), "causal": True},
        ("causal", "sliding_window"),
        (),
    ),
    ("bias", PLAIN_SIZES, lambda k: _bias_argument(k, (2, 4, 63, 63)), ("bias",), ()),
    (
        "slopes of ALiBi, causal, lse",
        PLAIN_SIZES,
        lambda k: {"alibi_slopes": 0.2 * jax.random.uniform(k, (4,)), "causal": True, **LSE},
        ("alibi_slopes", "causal"),
        (),
    ),
    (
        "mask of keys, slopes of rows",
        CROSS_SIZES,
        lambda k: {"attention_mask": _mask_of_real_keys(k, CROSS_SIZES), "alibi_slopes": jax.random.uniform(k, (2, 4))},
        ("mask", "alibi_slopes"),
        ("awkward",),
    ),
    *rows_with_functions(CROSS_SIZES, AttentionSizes(t=129, s=129)),
    (
        "bias of distances",
        CROSS_SIZES,
        lambda k: {"relative_bias": jax.random.normal(k, (4, 21))},
        ("relative_bias",),
        (),
    ),
    (
        "bias of -inf and soft cap, lse",
        PLAIN_SIZES,
        lambda k: {**_masking_bias(k, PLAIN_SIZES), **LSE, "logits_soft_cap": 1.5},
        ("bias", "logits_soft_cap"),
        ("awkward",),
    ),
    (
        "positions at the ends of int32",
        PLAIN_SIZES,
        lambda k: {**_extreme_positions(k, PLAIN_SIZES), "sliding_window": (None, 1)},
        (*_POSITION_FIELDS, "sliding_window"),
        ("awkward",),
    ),
    ("bias of keys", CROSS_SIZES, lambda k: _bias_argument(k, (2, 1, 1, 63)), ("bias",), ("awkward",)),
    (
        "mask with empty rows, lse",
        PLAIN_SIZES,
        lambda k: {**_mask_and_bias_arguments(k, PLAIN_SIZES), **LSE},
        ("mask",),
        ("awkward",),
    ),
    ("segments with padding", PLAIN_SIZES, lambda k: _segment_arguments(PLAIN_SIZES), _SEGMENT_FIELDS, ()),
    ("positions", PLAIN_SIZES, lambda k: _position_arguments(k, PLAIN_SIZES), (*_POSITION_FIELDS, "causal"), ()),
    ("sinks", PLAIN_SIZES, lambda k: _sink_argument(k, (3,)), ("softmax_aux",), ()),
    (
        "sinks by head, causal, lse",
        PLAIN_SIZES,
        lambda k: {**_sink_argument(k, (4, 2)), **LSE, "causal": True},
        ("softmax_aux", "causal"),
        (),
    ),
    ("soft cap", PLAIN_SIZES, lambda k: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
    ("dropout", PLAIN_SIZES, lambda k: _dropout_arguments(), ("dropout_prob", "dropout_seed"), ()),
    ("numerator only", PLAIN_SIZES, lambda k: {"normalize_output": False, "causal": True}, ("normalize_output",), ()),
    (
        "numerator and lse, sinks",
        PLAIN_SIZES,
        lambda k: {**_sink_argument(k, (4, 1)), **LSE, "normalize_output": False},
        ("normalize_output",),
        ("awkward",),
    ),
    (
        "coarse logits",
        PLAIN_SIZES,
        lambda k: {**exact_scores_inputs(k, PLAIN_SIZES), "logits_dtype": jnp.bfloat16},
        ("logits_dtype",),
        (),
    ),
    ("highest precision", PLAIN_SIZES, lambda k: {"precision": jax.lax.Precision.HIGHEST}, ("precision",), ()),
    (
        "packed",
        PACKED_SIZES,
        lambda k: {"cum_seqlens_q": jnp.array([0, 40, 40, 100, 120], jnp.int32), "causal": True},
        _SEGMENT_FIELDS,
        (),
    ),
    (
        "packed, other key lengths",
        AttentionSizes(b=1, t=100, s=129),
        lambda k: {
            "cum_seqlens_q": jnp.array([0, 30, 60, 100], jnp.int32),
            "cum_seqlens_k": jnp.array([0, 50, 50, 129], jnp.int32),
            "causal": True,
        },
        (*_SEGMENT_FIELDS, *_POSITION_FIELDS),
        ("awkward",),
    ),
    ("padded rows", PLAIN_SIZES, lambda k: {"cum_seqlens_q": jnp.array([0, 50, 63], jnp.int32)}, _SEGMENT_FIELDS, ()),
    (
        "everything",
        PLAIN_SIZES,
        lambda k: {
            **_segment_arguments(PLAIN_SIZES),
            **_bias_argument(k, (1, 4, 63, 63)),
            **_sink_argument(k, (2,)),
            **_dropout_arguments(0.1),
            **LSE,
            "causal": True,
            "sliding_window": (30, 0),
            "logits_soft_cap": 5.0,
        },
        (),
        (),
    ),
    (
        "bfloat16",
        AttentionSizes(t=129, s=129, d=64, v=64, dtype=jnp.bfloat16),
        lambda k: {"causal": True},
        ("causal",),
        (),
    ),
    (
        "float16",
        AttentionSizes(t=129, s=129, d=64, v=64, dtype=jnp.float16),
        lambda k: {"sliding_window": 30},
        ("sliding_window",),
        (),
    ),
    ("bfloat16, few queries and many keys", LONG_KEYS_SIZES, lambda k: _sink_argument(k, (2,)), ("softmax_aux",), ()),
    (
        "bfloat16, many queries and few keys",
        LONG_QUERIES_SIZES,
        lambda _: {"logits_soft_cap": 1.5},
        ("logits_soft_cap",),
        (),
    ),
    (
        "bfloat16, heads of 256, many queries and few keys",
        dataclasses.replace(LONG_QUERIES_SIZES, d=256, v=256),
        lambda k: _sink_argument(k, (4,)),
        ("softmax_aux",),
        (),
    ),
    (
        "bfloat16, causal window and bias",
        HALF_PRECISION_SIZES,
        lambda k: {**_bias_argument(k, (1, 4, 128, 128), jnp.bfloat16), "causal": True, "sliding_window": (30, 0)},
        ("causal", "sliding_window", "bias"),
        (),
    ),
    (
        "bfloat16, causal and bias of -inf, lse",
        HALF_PRECISION_SIZES,
        lambda k: {**_masking_bias(k, HALF_PRECISION_SIZES), **LSE, "causal": True},
        ("causal", "bias"),
        ("awkward",),
    ),
    (
        "bfloat16, segments and soft cap, lse",
        HALF_PRECISION_SIZES,
        lambda k: {**_segment_arguments(HALF_PRECISION_SIZES), **LSE, "logits_soft_cap": 1.5},
        (*_SEGMENT_FIELDS, "logits_soft_cap"),
        (),
    ),
    (
        "bfloat16, segments in no order",
        AttentionSizes(t=129, s=129, d=64, v=64, dtype=jnp.bfloat16),
        lambda k: {"mask_info": MaskInfo.from_segments(jax.random.randint(k, (2, 129), -1, 3)), "causal": True},
        (*_SEGMENT_FIELDS, "causal"),
        (),
    ),
    (
        "bfloat16, causal and sinks, lse",
        AttentionSizes(t=129, s=129, d=128, v=128, dtype=jnp.bfloat16),
        lambda k: {**_sink_argument(k, (4, 2)), **LSE, "causal": True},
        ("softmax_aux", "causal"),
        (),
    ),
    (
        "bfloat16, heads of 256",
        LARGE_HEAD_DIM_SIZES,
        lambda k: {
            "mask_info": MaskInfo.from_segments(jnp.array([_segment_ids_of_lengths((40, 30), 72)])),
            "causal": True,
        },
        (*_SEGMENT_FIELDS, "causal"),
        (),
    ),
    (
        "bfloat16, dropout and soft cap, lse",
        HALF_PRECISION_SIZES,
        lambda k: {**_dropout_arguments(), **LSE, "logits_soft_cap": 1.5},
        ("dropout_prob", "dropout_seed", "logits_soft_cap"),
        (),
    ),
    (
        "bfloat16, dropout of many keys",
        LONG_KEYS_SIZES,
        lambda k: _dropout_arguments(),
        ("dropout_prob", "dropout_seed"),
        (),
    ),
    (
        "bfloat16, heads of 256 and dropout",
        LARGE_HEAD_DIM_SIZES,
        lambda k: {**_segment_arguments(LARGE_HEAD_DIM_SIZES), **_dropout_arguments()},
        (*_SEGMENT_FIELDS, "dropout_prob", "dropout_seed"),
        (),
    ),
    ("bfloat16, keys of 192 and values of 128", LATENT_SIZES, lambda _: {"causal": True}, ("causal",), ()),
    (
        "bfloat16, keys of 192 and values of 128, segments, dropout and soft cap",
        LATENT_SIZES,
        lambda _: {
            "mask_info": MaskInfo.from_segments(jnp.array([_segment_ids_of_lengths((40, 70), 140)])),
            **_dropout_arguments(),
            "logits_soft_cap": 1.5,
        },
        (*_SEGMENT_FIELDS, "dropout_prob", "dropout_seed", "logits_soft_cap"),
        ("awkward",),
    ),
    *timed_case_rows(),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, qkv, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, even lengths, everything
    attending.
    """
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> Any:
    if name == "mask_info":
        return fill_mask_info(shape)
    if name in ("score_mod", "mask_mod"):
        return fill_function(key, shape)
    if name.startswith("cum_seqlens"):
        total = (args.query if name.endswith("q") else args.key).shape[1] * args.query.shape[0]
        return even_cu_seqlens(total, shape)
    if name == "dropout_seed":
        return jnp.zeros(shape.shape, shape.dtype)
    return normal_like(key, shape)
