"""The tiled softmax attention family: the record its operations lower to, its meaning and its residuals."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.contract import Family, RequestIsolation
from ejkernel.families.tiled_attention.gradients import (
    sinks_gradient,
    split_unnormalised_backward,
    subtract_lse_cotangent,
    unnormalised_gradients,
)
from ejkernel.families.tiled_attention.isolation import has_segments, isolate_pullback, move_nonfinite_values_to_keys
from ejkernel.families.tiled_attention.record import (
    FAR,
    SoftmaxResiduals,
    TiledAttention,
    Window,
    causal_window_bounds,
    indices_in_call,
    make_dropout_keys,
    query_and_key_positions,
)
from ejkernel.families.tiled_attention.reference import reference, reference_scores
from ejkernel.families.tiled_attention.scores import apply_soft_cap, round_to_logits_dtype
from ejkernel.planning.requests import common_owner_or_shared, segment_owners

__all__ = [
    "DROPOUT_FIELDS",
    "FAMILY",
    "FAR",
    "MASK_FIELDS",
    "NUMERICS_FIELDS",
    "SOFTMAX_FIELDS",
    "SoftmaxResiduals",
    "TiledAttention",
    "Window",
    "apply_shard_offsets",
    "apply_soft_cap",
    "causal_window_bounds",
    "indices_in_call",
    "invariance_limits",
    "make_dropout_keys",
    "query_and_key_positions",
    "reference",
    "reference_scores",
    "requests",
    "round_to_logits_dtype",
    "sinks_gradient",
    "split_unnormalised_backward",
    "subtract_lse_cotangent",
    "unnormalised_gradients",
]


def apply_shard_offsets(record: TiledAttention, offsets: Mapping[str, jax.Array]) -> TiledAttention:
    """Makes one shard's record mean its part of the global call: positions and the counters of dropout are global."""
    queries = offsets.get("t")
    moved: dict[str, jax.Array] = {}
    compared = causal_window_bounds(record) != (None, None) or record.alibi_slopes is not None
    if queries is not None and record.q_positions is None and compared:
        moved["q_positions"] = query_and_key_positions(record)[0] + queries
    by_index = (record.pattern, record.relative_bias, record.score_mod, record.mask_mod)
    if record.dropout_prob > 0.0 or any(x is not None for x in by_index):
        moved["dropout_origin"] = jnp.stack([jnp.int32(offsets.get(letter, 0)) for letter in "bhts"])
    return dataclasses.replace(record, **moved)


def requests(record: Any) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the segments of rows, or the rows."""
    if record.q_segment_ids is None:
        return ({"b": np.arange(record.query.shape[0])},)
    queries, keys = np.asarray(record.q_segment_ids), np.asarray(record.kv_segment_ids)
    owners = segment_owners(np.concatenate([queries, keys], axis=1))
    queries, keys = owners[:, : queries.shape[1]], owners[:, queries.shape[1] :]
    return ({"b t": queries, "b s": keys, "b t s": common_owner_or_shared(queries[:, :, None], keys[:, None])},)


def invariances(record: TiledAttention) -> frozenset[str]:
    """Returns what the rows of a record may depend on; `packing` is included only if there are segments."""
    return frozenset({"batch", "padding", "chunking", *(("packing",) if has_segments(record) else ())})


def invariance_limits(record: TiledAttention) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call, where tiles are cut from its first query and key."""
    if record.dropout_prob > 0:
        yield "dropout_prob: which weights are dropped follows from a row's place in the batch"
    if record.pattern is not None:
        yield "pattern: its tiles are cut from the first query and key of the call"
    for name in ("score_mod", "mask_mod"):
        if getattr(record, name) is not None:
            yield f"{name}: it is given the indices of a pair in the whole call"


FAMILY = Family(
    name="tiled_attention",
    record=TiledAttention,
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes={"output": "b t h v"},
    shardable="bthg",
    aligned=(("h", "g"),),
    apply_shard_offsets=apply_shard_offsets,
    reference=reference,
    requests=requests,
    request_isolation=RequestIsolation(
        record=move_nonfinite_values_to_keys, pullback=isolate_pullback, may_share_tiles=has_segments
    ),
    lse="b h t",
    invariances=invariances,
)

MASK_FIELDS = frozenset(
    {"mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "causal", "sliding_window"}
)
SOFTMAX_FIELDS = frozenset({"softmax_aux", "logits_soft_cap"})
DROPOUT_FIELDS = frozenset({"dropout_seed", "dropout_origin", "dropout_prob"})
NUMERICS_FIELDS = frozenset({"normalize_output", "precision", "logits_dtype"})
"""Groups of optional fields, for backends to say which they handle."""
