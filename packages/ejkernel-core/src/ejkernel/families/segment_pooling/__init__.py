"""The segment pooling family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.segment_pooling.record import SegmentPooling, accumulator, chunk_ranges, pool_bounds
from ejkernel.families.segment_pooling.reference import reference
from ejkernel.planning.requests import PADDING

__all__ = ["FAMILY", "SegmentPooling", "accumulator", "chunk_ranges", "pool_bounds", "reference", "requests"]


def requests(record: SegmentPooling) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the pools, since none has a token of another."""
    (first, end), token = (np.asarray(x) for x in pool_bounds(record)), np.arange(record.values.shape[1])
    rows, pools = record.values.shape[0], first.shape[1]
    first, end = (np.broadcast_to(x, (rows, pools)) for x in (first, end))
    inside = (token >= first[..., None]) & (token < end[..., None])
    pool = np.arange(rows * pools).reshape(rows, pools)
    tokens = np.where(inside.any(axis=1), np.take_along_axis(pool, inside.argmax(axis=1), axis=1), PADDING)
    return ({"b t": tokens, "b p": np.where(inside.any(axis=2), pool, PADDING)},)


def invariances(record: SegmentPooling) -> frozenset[str]:
    """Returns what the pools of a record may depend on."""
    names = {"padding": record.lengths is not None or record.ranges is not None, "packing": record.ranges is not None}
    return frozenset({"batch", *(name for name, depends in names.items() if depends)})


FAMILY = Family(
    name="segment_pooling",
    record=SegmentPooling,
    differentiable=("values",),
    dtype=lambda record: record.values.dtype,
    head_dims=lambda record: (record.values.shape[-1],),
    axes={"values": "b t h d", "lengths": "b", "ranges": "p c", "output": "b p h d"},
    # Each shard is a separate call, since rows, heads and channels are independent.
    shardable="bhd",
    reference=reference,
    requests=requests,
    invariances=invariances,
)
