"""Conformance cases of the Hopper kernels: patterns, positions and long rows in 16 bits, with head dimensions and tiles
that they support.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.blocksparse_attention import BlockSparseAttentionArguments
from ejkernel.modules.operations.cases.flash_attention import AttentionSizes, qkv
from ejkernel.modules.operations.cases.pair_function_options import cases_of_options
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows, tagged_case
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.ops.model import LONG_ROWS_TAG, Case
from ejkernel.types import MaskInfo
from ejkernel.types.sparse_masks import ChunkedCausalMask, LocalMask, Mask, NumpyMask

DEFAULT_PROBLEM = AttentionSizes(b=2, t=320, s=320, h=4, g=2, d=64, v=64, dtype=jnp.bfloat16)


def _random_blocks_mask(q_len: int, kv_len: int, num_heads: int, head: int, _: int) -> Mask:
    """Returns blocks of 64: full, partial and empty tiles, and none for the queries from 128 to 191."""
    attending_blocks = np.random.RandomState(7).rand(cdiv(q_len, 64), cdiv(kv_len, 64)) < 0.5
    attending_blocks[2] = False
    return NumpyMask(np.kron(attending_blocks, np.ones((64, 64), bool))[:q_len, :kv_len])


def _random_pairs_mask(q_len: int, kv_len: int, num_heads: int, head: int, _: int) -> Mask:
    """Returns random pairs, so that no two tiles have the same mask."""
    return NumpyMask(np.random.RandomState(8).rand(q_len, kv_len) < 0.2)


def _different_mask_per_head(q_len: int, kv_len: int, num_heads: int, head: int, _: int) -> Mask:
    """Returns a different pattern for every other head, of which two share their keys."""
    return ChunkedCausalMask((q_len, kv_len), 96) if head % 2 else LocalMask((q_len, kv_len), (40, 9))


def _segment_inputs(key: jax.Array) -> dict[str, Any]:
    ids = jnp.array([[0] * 100 + [1] * 190 + [-1] * 30, [0] * 320], jnp.int32)
    return {"mask_builder": _random_blocks_mask, "mask_info": MaskInfo.from_segments(ids), "causal": True}


def _sink_inputs(key: jax.Array) -> dict[str, Any]:
    return {"mask_builder": _random_pairs_mask, "causal": False, "softmax_aux": jax.random.normal(key, (4, 2))}


def _soft_cap_inputs(key: jax.Array) -> dict[str, Any]:
    return {"mask_builder": _random_blocks_mask, "causal": True, "logits_soft_cap": 5.0}


def _document_inputs(key: jax.Array) -> dict[str, Any]:
    """Returns a mask of documents, which differ by batch row and come back later, and biases by head and distance."""
    documents = jax.random.randint(key, (2, 10), -1, 3).repeat(32, axis=1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (documents[b, q_idx] == documents[b, k_idx]) & (k_idx <= q_idx) & (q_idx != 3)

    return {"mask_mod": mask_mod, "score_mod": _decay, "causal": False}


def _document_and_window_inputs(key: jax.Array) -> dict[str, Any]:
    """Returns a mask that is equivalent to segment ids and a window, and a soft cap by function."""
    documents = jnp.cumsum(jax.random.bernoulli(key, 0.02, (2, 320)), axis=1) - 1

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (documents[b, q_idx] == documents[b, k_idx]) & (k_idx <= q_idx) & (q_idx - k_idx < 100)

    return {"mask_mod": mask_mod, "score_mod": _soft_cap, "causal": False}


def _window_inputs(key: jax.Array) -> dict[str, Any]:
    return {"mask_mod": _window_of_two_sides, "score_mod": _decay, "causal": False}


def _soft_cap(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return 3.0 * jnp.tanh(score / 3.0)


def _prefix_inputs(key: jax.Array) -> dict[str, Any]:
    """Returns a prefix that grows with the head, a soft cap by function, and a bias by bucket of the distance."""
    buckets = jax.random.randint(key, (8, 4), -5, 5)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        bucket = jnp.minimum(jnp.log2(1.5 + jnp.abs(q_idx - k_idx)).astype(jnp.int32), 7)
        return 4.0 * jnp.tanh(score / 4.0) * jnp.where(k_idx % 3 == 0, 1.0, 0.5) + 0.2 * buckets[bucket, h]

    return {"mask_mod": _prefix_of_heads, "score_mod": score_mod, "causal": False}


def _decay(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score - jnp.exp2(-2.0 * (h + 1)) * jnp.abs(q_idx - k_idx) / (1 + b)


def _prefix_of_heads(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (k_idx < 70 * h) | (k_idx <= q_idx)


def _window_of_two_sides(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return jnp.abs(q_idx - k_idx) <= 50


_CASE_TABLE: tuple[tuple[str, dict[str, int], Callable[[jax.Array], dict[str, Any]]], ...] = (
    ("blocks of 64", {}, lambda key: {"mask_builder": _random_blocks_mask, "causal": False}),
    ("blocks of 64, causal, segments", {"d": 128, "v": 128}, _segment_inputs),
    ("pairs by chance, sinks, lse", {"d": 128, "v": 128}, lambda key: {**_sink_inputs(key), "return_lse": True}),
    ("patterns by head, size 64", {"d": 64}, lambda key: {"mask_builder": _different_mask_per_head, "causal": False}),
    (
        "patterns by head, 192 and 128",
        {"d": 192, "v": 128},
        lambda key: {"mask_builder": _different_mask_per_head, "causal": False},
    ),
    ("blocks of 64, causal, soft cap, 256", {"d": 256, "v": 256}, _soft_cap_inputs),
    ("pairs by chance, 256", {"d": 256, "v": 256}, lambda key: {"mask_builder": _random_pairs_mask, "causal": False}),
)


_FUNCTION_TABLE: tuple[tuple[str, dict[str, int], Callable[[jax.Array], dict[str, Any]]], ...] = (
    ("documents and decay by function", {"d": 64, "v": 64}, _document_inputs),
    ("documents and decay by function, 128", {"d": 128, "v": 128}, _document_inputs),
    ("prefix, soft cap and buckets by function", {"d": 64, "v": 64}, _prefix_inputs),
    ("prefix, soft cap and buckets by function, 128", {"d": 128, "v": 128}, _prefix_inputs),
    ("prefix, soft cap and buckets by function, 192 and 128", {"d": 192, "v": 128}, _prefix_inputs),
    ("documents and decay by function, 256", {"d": 256, "v": 256}, _document_inputs),
    ("prefix, soft cap and buckets by function, 256", {"d": 256, "v": 256}, _prefix_inputs),
    ("window and decay by function", {"d": 64, "v": 64}, _window_inputs),
    ("documents by function", {"d": 64, "v": 64}, _document_and_window_inputs),
)


_CHUNK_SIZES = AttentionSizes(b=2, t=150, s=500, h=4, g=2, d=128, v=128, dtype=jnp.bfloat16)
_SEGMENT_FIELDS = ("q_segment_ids", "kv_segment_ids")
_POSITION_FIELDS = ("q_positions", "kv_positions")


def _chunk_arguments(key: jax.Array) -> dict[str, Any]:
    """Returns the positions of the last queries of a prompt."""
    keys = jnp.arange(_CHUNK_SIZES.s, dtype=jnp.int32)[None].repeat(2, axis=0)
    return {"mask_info": MaskInfo(q_positions=keys[:, -_CHUNK_SIZES.t :], kv_positions=keys), "causal": True}


def _repeated_positions(key: jax.Array) -> dict[str, Any]:
    """Returns positions in order that several keys share, and queries in any order, some of which attend to nothing."""
    keys = jnp.arange(_CHUNK_SIZES.s, dtype=jnp.int32)[None] // 3 + jnp.array([[0], [7]], jnp.int32)
    queries = jax.random.randint(key, (2, _CHUNK_SIZES.t), -60, _CHUNK_SIZES.s // 3 + 60)
    return {"mask_info": MaskInfo(q_positions=queries, kv_positions=keys)}


def _unordered_positions(key: jax.Array) -> dict[str, Any]:
    """Returns positions of keys that are out of order in the first row of the batch."""
    order, queries = jax.random.split(key)
    keys = jnp.arange(_CHUNK_SIZES.s, dtype=jnp.int32)
    positions = jnp.stack([jax.random.permutation(order, keys), keys])
    queries = jax.random.randint(queries, (2, _CHUNK_SIZES.t), 0, _CHUNK_SIZES.s)
    return {"mask_info": MaskInfo(q_positions=queries, kv_positions=positions)}


def _window_cap_and_sinks(key: jax.Array, left: int) -> dict[str, Any]:
    """Returns a causal window of `left` keys before the query, a soft cap, and sinks of two heads."""
    return {
        "sliding_window": (left, 0),
        "logits_soft_cap": 3.0,
        "softmax_aux": jax.random.normal(key, (2,)),
    }


def _documents(key: jax.Array, in_order: bool = True) -> dict[str, Any]:
    """Returns ids of documents of random lengths, or of random tokens."""
    ids = jax.random.randint(key, (_LONG_SIZES.b, _LONG_SIZES.t), 0, 4)
    if in_order:
        ids = jnp.cumsum(jax.random.uniform(key, ids.shape) < 0.01, axis=1)
    return {"mask_info": MaskInfo.from_segments(ids.astype(jnp.int32))}


_LONG_SIZES = AttentionSizes(b=3, t=700, s=700, h=2, g=1, d=128, v=128, dtype=jnp.bfloat16)
_LONG_HALF_SIZES = dataclasses.replace(_LONG_SIZES, d=64, v=64, dtype=jnp.float16)
_FLASH_TABLE: tuple[Row[AttentionSizes], ...] = (
    ("long rows, causal", _LONG_SIZES, lambda key: {"causal": True}, ("causal",), (LONG_ROWS_TAG,)),
    (
        "long rows, causal window, soft cap, sinks",
        dataclasses.replace(_LONG_SIZES, d=64, v=64),
        lambda key: _window_cap_and_sinks(key, 300),
        ("sliding_window", "logits_soft_cap", "softmax_aux"),
        (),
    ),
    ("long rows, soft cap", _LONG_HALF_SIZES, lambda key: {"logits_soft_cap": 3.0}, ("logits_soft_cap",), ()),
    (
        "documents in long rows, causal",
        _LONG_SIZES,
        lambda key: {**_documents(key), "causal": True, "return_lse": True},
        (*_SEGMENT_FIELDS, "causal"),
        (LONG_ROWS_TAG,),
    ),
    (
        "documents, causal window, soft cap, sinks",
        dataclasses.replace(_LONG_SIZES, d=64, v=64),
        lambda key: {**_documents(key), **_window_cap_and_sinks(key, 150)},
        (*_SEGMENT_FIELDS, "sliding_window", "logits_soft_cap", "softmax_aux"),
        (),
    ),
    (
        "documents out of order, window",
        _LONG_HALF_SIZES,
        lambda key: {**_documents(key, in_order=False), "sliding_window": (150, 90)},
        (*_SEGMENT_FIELDS, "sliding_window"),
        (),
    ),
    ("positions of a chunk", _CHUNK_SIZES, _chunk_arguments, ("q_positions", "causal"), ()),
    (
        "positions that repeat, window, lse",
        dataclasses.replace(_CHUNK_SIZES, d=64, v=64),
        lambda key: {**_repeated_positions(key), "sliding_window": (40, 5), "return_lse": True},
        (*_POSITION_FIELDS, "sliding_window"),
        (),
    ),
    (
        "positions out of order, lse",
        dataclasses.replace(_CHUNK_SIZES, dtype=jnp.float16),
        lambda key: {**_unordered_positions(key), "causal": True, "return_lse": True},
        (*_POSITION_FIELDS, "causal"),
        (),
    ),
    (
        "positions out of order, window, soft cap",
        dataclasses.replace(_CHUNK_SIZES, d=256, v=256),
        lambda key: {**_unordered_positions(key), "sliding_window": (90, 20), "logits_soft_cap": 5.0},
        (*_POSITION_FIELDS, "sliding_window", "logits_soft_cap"),
        (),
    ),
    (
        "positions of a chunk, 192 and 128",
        dataclasses.replace(_CHUNK_SIZES, d=192),
        _chunk_arguments,
        ("q_positions", "causal"),
        (),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {
        "blocksparse_attention": tuple(_case(*row, exercises=("pattern",)) for row in _CASE_TABLE),
        "flash_attention": make_cases_of_rows(FlashAttentionArguments, qkv, _FLASH_TABLE),
    }


def function_cases() -> dict[str, tuple[Case, ...]]:
    """Returns those with functions of pairs."""
    rows = tuple(_case(*row, exercises=("score_mod", "mask_mod")) for row in _FUNCTION_TABLE)
    return {"blocksparse_attention": rows, "flash_attention": cases_of_options(FlashAttentionArguments)}


def _case(
    name: str,
    sizes: dict[str, int],
    extra_arguments: Callable[[jax.Array], dict[str, Any]],
    exercises: tuple[str, ...],
) -> Case:
    def make_arguments(key: jax.Array) -> Any:
        inputs, options = jax.random.split(key)
        arrays = {n: x.swapaxes(1, 2) for n, x in qkv(inputs, dataclasses.replace(DEFAULT_PROBLEM, **sizes)).items()}
        return BlockSparseAttentionArguments(**arrays, **extra_arguments(options))

    return tagged_case(name, make_arguments, exercises, ())
