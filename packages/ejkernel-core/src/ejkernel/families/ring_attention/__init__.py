"""The ring attention family: tiled softmax attention whose sequence is spread over the devices of a mesh axis."""

import dataclasses
from collections.abc import Mapping

import jax

from ejkernel.families import tiled_attention
from ejkernel.families.contract import Family
from ejkernel.families.ring_attention.record import (
    RingAttention,
    as_tiled_attention,
    axis_size,
    is_axis_bound,
    with_gathered_keys,
)
from ejkernel.families.ring_attention.reference import reference

__all__ = [
    "FAMILY",
    "RingAttention",
    "apply_shard_offsets",
    "as_tiled_attention",
    "axis_size",
    "is_axis_bound",
    "reference",
    "with_gathered_keys",
]


def apply_shard_offsets(record: RingAttention, offsets: Mapping[str, jax.Array]) -> RingAttention:
    """Converts the positions of a part of the queries to positions in the whole sequence, for calls on one device. A
    ring computes its positions itself, and needs only the first row and head of functions of pairs.
    """
    moved = tiled_attention.apply_shard_offsets(as_tiled_attention(record), offsets)
    if record.axis_name is not None:
        return dataclasses.replace(record, index_origin=moved.dropout_origin)
    return dataclasses.replace(record, q_positions=moved.q_positions, index_origin=moved.dropout_origin)


FAMILY = Family(
    name="ring_attention",
    record=RingAttention,
    differentiable=("query", "key", "value", "bias", "score_mod", "softmax_aux"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes={
        "query": "b t h d",
        "key": "b s g d",
        "value": "b s g v",
        "bias": "b h t k",
        "mask": "b h t k",
        "q_segment_ids": "b t",
        "kv_segment_ids": "b s",
        "q_positions": "b t",
        "kv_positions": "b s",
        "softmax_aux": "h",
        "index_origin": "c",
        "output": "b t h v",
    },
    # Along a ring's axis, queries and keys are split alike; on one device the keys are all there.
    shardable=lambda record: "bthg" if record.axis_name is None else "bthgs",
    aligned=(("h", "g"), ("t", "s")),
    apply_shard_offsets=apply_shard_offsets,
    reference=reference,
    requests=tiled_attention.requests,
    request_isolation=tiled_attention.FAMILY.request_isolation,
    lse="b h t",
)
