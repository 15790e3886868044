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
    yield from with_fewer_queries(family, record, 1)
    more = 37
    arrays = {name: getattr(record, name, None) for name in ("key", "value")}
    longer = {
        name: np.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1)
        for name, x in arrays.items()
        if x is not None
    }
    yield Change("padding", f"{more} keys more", dataclasses.replace(record, **longer), ((whole, whole),))


def with_fewer_queries(family: Family, record: Any, outputs: int) -> Iterator[Change]:
    """Yields calls with the last queries of each row, of a record whose queries [B, T, ...] say where they are.

    Args:
        family: The family.
        record: The record.
        outputs: The number of outputs that have a row of each query.
    """
    queries = record.query.shape[1]
    if queries > 1:
        for first, how in ((queries // 3 or 1, "a chunk"), (queries - 1, "the last query alone")):
            index = np.arange(first, queries)
            rows = ((take(index, 1), whole),) * outputs
            yield Change("chunking", how, with_axis(family, record, "t", index, queries), rows)


def changes_of_indexers(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of the lightning indexer, whose outputs are indices and scores."""
    yield from changes_of_rows(family, record)
    yield from with_fewer_queries(family, record, 2)
    both = ((whole, whole),) * 2
    if record.block_tables is None:
        longer: dict[str, Any] = {"key": np.pad(record.key, ((0, 0), (0, 37), (0, 0)), constant_values=1)}
        if record.key_scales is not None:
            longer["key_scales"] = np.pad(record.key_scales, ((0, 0), (0, 37)), constant_values=1)
        yield Change("padding", "37 keys more", dataclasses.replace(record, **longer), both)
        return
    wide = np.pad(record.block_tables, ((0, 0), (0, 3)), constant_values=-1)
    yield Change("padding", "wider tables", dataclasses.replace(record, block_tables=wide), both)
    pages, tables = record.key.shape[0], record.block_tables
    order = np.random.default_rng(0).permutation(pages)
    moved = np.where((tables >= 0) & (tables < pages), np.argsort(order)[np.clip(tables, 0, pages - 1)], tables)
    changed = with_axis(family, record, "p", order, pages)
    yield Change("pages", "in another order", dataclasses.replace(changed, block_tables=moved), both)


def changes_of_selections(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of selected attention."""
    yield from changes_of_rows(family, record)
    if record.window_size is None:
        positions = np.arange(record.query.shape[1], dtype=np.int32)[None]
        given = record.q_positions is not None
        placed = record if given else dataclasses.replace(record, q_positions=positions)
        yield from with_fewer_queries(family, placed, 1)
        lists_all_keys = record.block_indices is None and record.compressed_key is None
        if record.block_tables is None and record.kv_segment_ids is None and not lists_all_keys:
            width = ((0, 0), (0, record.block_size), (0, 0), (0, 0))
            longer = {name: np.pad(getattr(record, name), width, constant_values=1) for name in ("key", "value")}
            yield Change("padding", "a block more", dataclasses.replace(placed, **longer), ((whole, whole),))


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
