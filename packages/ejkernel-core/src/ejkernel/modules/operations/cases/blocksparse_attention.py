"""Inputs for `blocksparse_attention`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.operations.cases import flash_attention as flash_attention_cases
from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, qkv
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo
from ejkernel.types.sparse_masks import CausalMask, ChunkedCausalMask, LocalMask, Mask, NumpyMask

SMALL_SIZES = AttentionSizes(t=40, s=62, d=8, v=12)
SQUARE_SIZES = AttentionSizes(t=64, s=64, d=8, v=8)


def _mask_of_head(q_len: int, kv_len: int, num_heads: int, head: int, _: int) -> Mask:
    shape = (q_len, kv_len)
    return ChunkedCausalMask(shape, 16) if head % 3 else LocalMask(shape, (5, 9)) & CausalMask(shape, offset=4)


def _scattered_mask(q_len: int, kv_len: int, num_heads: int, head: int, _: int) -> Mask:
    rows, columns = np.arange(q_len)[:, None] // 8, np.arange(kv_len) // 8
    return NumpyMask((rows * 3 + columns) % 4 == 0) | LocalMask((q_len, kv_len), (0, 0))


def _pattern_arguments(key: jax.Array) -> dict[str, Any]:
    return {"mask_builder": _mask_of_head, "causal": False}


def _pattern_and_functions(key: jax.Array) -> dict[str, Any]:
    """Returns a pattern, a mask function that reads nothing but indices, and a score function with an array."""
    slopes = jax.random.uniform(key, (4,))
    return {
        "mask_builder": _scattered_mask,
        "mask_mod": lambda b, h, q_idx, k_idx: (k_idx + q_idx) % 5 > 0,
        "score_mod": lambda score, b, h, q_idx, k_idx: score - slopes[h] * jnp.abs(k_idx - q_idx),
        "causal": False,
    }


def _mask_and_bias_arguments(key: jax.Array) -> dict[str, Any]:
    mask, bias = jax.random.split(key)
    allowed = jax.random.bernoulli(mask, 0.6, (2, 4, 40, 62)).at[:, :, 3].set(False)
    pattern = {"mask_builder": _scattered_mask, "causal": False}
    return {**pattern, "attention_mask": allowed, "bias": jax.random.normal(bias, (1, 4, 40, 62))}


def _position_arguments(key: jax.Array) -> dict[str, Any]:
    positions = jax.random.randint(key, (2, 40), 0, 62)
    return {
        "mask_info": MaskInfo(q_positions=positions, kv_positions=jnp.arange(62)[None] + 1),
        "sliding_window": (20, 0),
    }


def _segment_arguments(key: jax.Array) -> dict[str, Any]:
    ids = jnp.array([[0] * 20 + [1] * 35 + [-1] * 9, [0] * 64], jnp.int32)
    return {"mask_info": MaskInfo.from_segments(ids), "chunk_size": 24}


def _sink_arguments(key: jax.Array) -> dict[str, Any]:
    return {"softmax_aux": jax.random.normal(key, (4, 2)), "logits_soft_cap": 1.5, "return_lse": True}


_CASE_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("causal", SQUARE_SIZES, lambda k: {}, ("causal",), ()),
    (
        "one query, head size 60",
        AttentionSizes(t=1, s=129, g=1, d=60, v=48),
        lambda k: {"causal": False},
        (),
        ("awkward",),
    ),
    ("patterns by head", SQUARE_SIZES, _pattern_arguments, ("pattern",), ()),
    (
        "scattered blocks, mask and bias, empty rows",
        SMALL_SIZES,
        _mask_and_bias_arguments,
        ("pattern", "mask", "bias"),
        ("awkward",),
    ),
    ("pattern and functions of pairs", SMALL_SIZES, _pattern_and_functions, ("pattern", "score_mod", "mask_mod"), ()),
    ("positions", SMALL_SIZES, _position_arguments, ("q_positions", "kv_positions", "causal", "sliding_window"), ()),
    ("chunks of segments", SQUARE_SIZES, _segment_arguments, ("q_segment_ids", "kv_segment_ids"), ()),
    (
        "capped, with sinks, lse",
        SMALL_SIZES,
        _sink_arguments,
        ("softmax_aux", "logits_soft_cap"),
        (),
    ),
    ("bfloat16", dataclasses.replace(SQUARE_SIZES, dtype=jnp.bfloat16), _pattern_arguments, ("pattern",), ()),
    (
        "model",
        AttentionSizes(b=1, t=4096, s=4096, h=16, g=4, d=128, v=128, dtype=jnp.bfloat16),
        lambda k: {"mask_builder": lambda q, k, *_: LocalMask((q, k), (512, 0)), "causal": False},
        (),
        ("bench",),
    ),
    (
        "small model",
        AttentionSizes(b=1, t=512, s=512, h=8, g=2, d=64, v=64),
        lambda k: {"mask_builder": lambda q, k, *_: LocalMask((q, k), (128, 0)), "causal": False},
        (),
        ("bench_cpu",),
    ),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, _inputs_with_heads_first, _CASE_TABLE)


def _inputs_with_heads_first(key: jax.Array, sizes: AttentionSizes) -> dict[str, jax.Array]:
    return {name: x.swapaxes(1, 2) for name, x in qkv(key, sizes).items()}


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns the inputs of `flash_attention_cases.make_inputs`; the `attention_mask` lets all pairs attend."""
    inputs = flash_attention_cases.make_inputs(dataclasses.replace(args, attention_mask=None), key)
    mask = args.attention_mask
    return inputs if mask is None else dataclasses.replace(inputs, attention_mask=jnp.ones(mask.shape, mask.dtype))
