"""Changed calls of operations whose queries list their keys, and of pools, that share rows with a call."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel_conformance.row_changes import Change, changes_of_rows, take, whole, with_axis


def changes_of_lists(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of queries [B, T, ...] that list the keys they read."""
    yield from changes_of_rows(family, record)
    queries, more = record.query.shape[1], 37
    if queries > 1:
        for first, how in ((queries // 3 or 1, "a chunk"), (queries - 1, "the last query alone")):
            index = np.arange(first, queries)
            yield Change("chunking", how, with_axis(family, record, "t", index, queries), ((take(index, 1), whole),))
    arrays = {name: getattr(record, name, None) for name in ("key", "value")}
    longer = {
        name: np.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1)
        for name, x in arrays.items()
        if x is not None
    }
    yield Change("padding", f"{more} keys more", dataclasses.replace(record, **longer), ((whole, whole),))


def changes_of_pools(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of segment pooling."""
    yield from changes_of_rows(family, record)
    more, pools = 37, np.arange(-(-record.values.shape[1] // record.chunk_size))
    longer = np.pad(record.values, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1)
    if record.lengths is not None or record.ranges is not None:
        rows = ((whole, whole if record.ranges is not None else take(pools, 1)),)
        yield Change("padding", f"{more} tokens more", dataclasses.replace(record, values=longer), rows)
    if record.ranges is not None:
        n = int((record.ranges[:, 1] - record.ranges[:, 0]).argmax())
        first, end = record.ranges[n]
        alone = dataclasses.replace(record, values=record.values[:, first:end], ranges=record.ranges[n : n + 1] - first)
        yield Change("packing", "a pool alone", alone, ((take([n], 1), whole),))
