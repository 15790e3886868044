"""Changed calls that share rows with a call, by family and by name in `ejkernel.types.invariances.INVARIANCES`."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.tiled_attention import causal_window_bounds
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.query_changes import (
    changes_of_indexers,
    changes_of_lists,
    changes_of_pools,
    changes_of_selections,
)
from ejkernel_conformance.recurrence_changes import changes_of_networks, changes_of_recurrences
from ejkernel_conformance.row_changes import Change, changes_of_rows, take, whole, with_axis


def changes_of_attention(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of dense attention."""
    yield from changes_of_rows(family, record)
    yield from _with_more_padding(record)
    yield from _with_longer_rows(record)
    yield from _with_fewer_queries(family, record)
    yield from _with_a_segment_alone(family, record)
    yield from _with_another_segment_first(record)
    yield from _with_rows_packed(record)


def _needs_positions(record: Any) -> bool:
    return causal_window_bounds(record) != (None, None) or record.alibi_slopes is not None


def _positions(record: Any, side: str) -> np.ndarray:
    given = getattr(record, f"{side}_positions")
    size = (record.query if side == "q" else record.key).shape[1]
    return np.arange(size, dtype=np.int32)[None] if given is None else given


def _with_fewer_queries(family: Family, record: Any) -> Iterator[Change]:
    queries = record.query.shape[1]
    if queries < 2 or record.relative_bias is not None:
        return
    if _needs_positions(record):
        record = dataclasses.replace(record, **{f"{x}_positions": _positions(record, x) for x in ("q", "kv")})
    for first, how in ((queries // 3 or 1, "a chunk"), (queries - 1, "the last query alone")):
        index = np.arange(first, queries)
        yield Change("chunking", how, with_axis(family, record, "t", index, queries), ((take(index, 1), whole),))


def _with_more_padding(record: Any) -> Iterator[Change]:
    """Yields a call with 37 more keys, which no query attends to."""
    (batch, queries, _, _), keys, more = record.query.shape, record.key.shape[1], 37
    pairs = (record.bias, record.mask)
    if any(x is not None and x.shape[3] != 1 for x in pairs):
        return
    ids = record.q_segment_ids, record.kv_segment_ids
    if ids[0] is None or ids[1] is None:
        ids = np.zeros((batch, queries), np.int32), np.zeros((batch, keys), np.int32)
    changes = {
        "key": np.pad(record.key, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1),
        "value": np.pad(record.value, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1),
        "q_segment_ids": ids[0],
        "kv_segment_ids": np.pad(ids[1], ((0, 0), (0, more)), constant_values=-1),
    }
    if record.kv_positions is not None:
        changes["kv_positions"] = np.pad(record.kv_positions, ((0, 0), (0, more)))
    yield Change("padding", f"{more} keys more", dataclasses.replace(record, **changes), ((whole, whole),))


def _with_longer_rows(record: Any) -> Iterator[Change]:
    """Yields a causal call whose rows have 37 more tokens after those that are compared."""
    arrays = array_fields(record).keys() - {"query", "key", "value", "softmax_aux", "alibi_slopes"}
    queries, more = record.query.shape[1], 37
    if causal_window_bounds(record)[1] != 0 or queries > record.key.shape[1] or arrays:
        return
    changes = {
        name: np.pad(getattr(record, name), ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=1)
        for name in ("query", "key", "value")
    }
    select = take(np.arange(queries), 1)
    yield Change("padding", f"{more} tokens more", dataclasses.replace(record, **changes), ((whole, select),))


def _with_a_segment_alone(family: Family, record: Any) -> Iterator[Change]:
    """Yields a call of the last segment of the first row, cut out of the row."""
    ids = record.q_segment_ids, record.kv_segment_ids
    if ids[0] is None or ids[1] is None or record.relative_bias is not None:
        return
    segment = ids[0][0].max()
    queries, keys = (np.flatnonzero(x[0] == segment) for x in ids)
    if segment < 0 or not keys.size:
        return
    # Indices that both sides lose alike leave distances as they are.
    has_same_start = queries[0] == keys[0] and all(np.ptp(x) + 1 == x.size for x in (queries, keys))
    needs_positions = _needs_positions(record) and not has_same_start
    moved = {f"{side}_positions": _positions(record, side) for side in ("q", "kv")} if needs_positions else {}
    (batch, length, _, _), key_length = record.query.shape, record.key.shape[1]
    alone = dataclasses.replace(record, **moved)
    for letter, index, size in (("b", np.array([0]), batch), ("t", queries, length), ("s", keys, key_length)):
        alone = with_axis(family, alone, letter, index, size)
    yield Change("packing", "a segment alone", alone, ((lambda x: x[:1][:, queries], whole),))


def _with_another_segment_first(record: Any) -> Iterator[Change]:
    """Yields a call whose rows have another segment of 37 tokens before their tokens."""
    ids, more = (record.q_segment_ids, record.kv_segment_ids), 37
    names = ("query", "key", "value")
    others = array_fields(record).keys() - {*names, "softmax_aux", "alibi_slopes", "q_segment_ids", "kv_segment_ids"}
    if ids[0] is None or ids[1] is None or others:
        return
    changes = {
        name: np.pad(getattr(record, name), ((0, 0), (more, 0), (0, 0), (0, 0)), constant_values=1) for name in names
    }
    for side, x in zip(("q", "kv"), ids, strict=True):
        changes[f"{side}_segment_ids"] = np.pad(np.where(x < 0, x, x + 1), ((0, 0), (more, 0)))
    select = take(more + np.arange(record.query.shape[1]), 1)
    changed = dataclasses.replace(record, **changes)
    yield Change("packing", f"another segment of {more} tokens first", changed, ((whole, select),))


def _with_rows_packed(record: Any) -> Iterator[Change]:
    """Yields a call in which the rows of the batch are one packed row."""
    (batch, queries, _, _), keys = record.query.shape, record.key.shape[1]
    arrays = array_fields(record).keys() - {"query", "key", "value", "softmax_aux"}
    if batch < 2 or arrays or record.alibi_slopes is not None:
        return
    changes: dict[str, Any] = {
        name: getattr(record, name).reshape(1, -1, *getattr(record, name).shape[2:])
        for name in ("query", "key", "value")
    }
    for side, size in (("q", queries), ("kv", keys)):
        changes[f"{side}_segment_ids"] = np.repeat(np.arange(batch, dtype=np.int32), size)[None]
        if _needs_positions(record) and queries != keys:
            changes[f"{side}_positions"] = np.tile(np.arange(size, dtype=np.int32), batch)[None]
    yield Change("packing", "rows in one packed row", dataclasses.replace(record, **changes), ((_in_one_row, whole),))


def _in_one_row(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, -1, *x.shape[2:])


def changes_of_pages(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of paged attention."""
    sequences = record.kv_lens.shape[0]
    if record.num_seqs is None and record.shared_prefix is None and sequences > 1:
        for how, index in (("the last sequence alone", [sequences - 1]), ("in reverse", np.arange(sequences)[::-1])):
            if (change := _with_sequences(family, record, np.asarray(index), how)) is not None:
                yield change
    if record.block_tables is None:
        return
    wide = np.pad(record.block_tables, ((0, 0), (0, 3)), constant_values=-1)
    both = ((whole, whole),) * 2
    yield Change("padding", "wider tables", dataclasses.replace(record, block_tables=wide), both)
    yield from _with_other_pages(family, record, both)
    yield from _with_last_queries(record)


def _rows_of(record: Any) -> list[np.ndarray]:
    """Returns the query rows of each sequence."""
    if record.query_start is None:
        return [np.array([n]) for n in range(record.kv_lens.shape[0])]
    starts = record.query_start
    return [np.arange(a, max(a, b)) for a, b in itertools.pairwise(starts)]


def _with_sequences(family: Family, record: Any, index: np.ndarray, how: str) -> Change | None:
    """Returns a call of some sequences; None if these have no rows, or the record has tables of pairs, or functions of
    pairs, which may read a sequence's index.
    """
    rows = np.concatenate([_rows_of(record)[n] for n in index])
    unlike_alone = (record.qq_bias, record.score_mod, record.mask_mod, record.new_keys)
    if not rows.size or not all(x is None for x in unlike_alone):
        return None
    changed = with_axis(family, record, "r", index, record.kv_lens.shape[0])
    if record.query_start is not None:
        lengths = [0, *(len(_rows_of(record)[n]) for n in index)]
        changed = dataclasses.replace(
            changed, query=record.query[rows], query_start=np.cumsum(lengths).astype(record.query_start.dtype)
        )
    return Change("batch", how, changed, ((take(rows), whole),) * 2)


def _with_other_pages(family: Family, record: Any, rows: Any) -> Iterator[Change]:
    if record.new_keys is not None or record.code_bits is not None:
        return
    pages, slots, tables = paged_cache.page_count(record), paged_cache.page_size(record), record.block_tables
    order = np.random.default_rng(0).permutation(pages)
    moved = np.where((tables >= 0) & (tables < pages), np.argsort(order)[np.clip(tables, 0, pages - 1)], tables)
    changed = with_axis(family, record, "p", order, pages)
    yield Change(
        "pages", "in another order", dataclasses.replace(changed, block_tables=moved.astype(tables.dtype)), rows
    )
    if slots % 2 or record.shared_prefix is not None:
        return
    halves = np.where((tables >= 0) & (tables < pages), tables * 2, -1)
    halves = np.stack([halves, np.where(halves >= 0, halves + 1, -1)], axis=-1).reshape(tables.shape[0], -1)
    names = [name for name in ("key_pages", "value_pages") if getattr(record, name) is not None]
    changes = {name: _halved(getattr(record, name), record.kv_layout) for name in names}
    record = dataclasses.replace(record, block_tables=halves.astype(tables.dtype), **changes)
    yield Change("pages", "of half the size", record, rows)


def _halved(x: np.ndarray, layout: str) -> np.ndarray:
    """Returns pages with half the slots each, twice as many."""
    slots = layout.index("s")
    near = np.moveaxis(x, slots, 1)
    near = near.reshape(near.shape[0] * 2, near.shape[1] // 2, *near.shape[2:])
    return np.moveaxis(near, 1, slots)


def _with_last_queries(record: Any) -> Iterator[Change]:
    """Yields a call with the last query of each sequence alone, and one with all but those."""
    if record.query_start is None or record.qq_bias is not None or record.new_keys is not None:
        return
    rows = _rows_of(record)
    if all(len(x) < 2 for x in rows):
        return
    kept = [x[-1:] for x in rows]
    yield _with_queries(record, kept, record.kv_lens, "the last query of each sequence")
    if record.causal and record.num_seqs is None:
        lengths = record.kv_lens - np.array([min(len(x), 1) for x in rows])
        fewer = [x[:-1] for x in rows]
        if not any(len(x) == 1 for x in rows):
            yield _with_queries(record, fewer, lengths.astype(record.kv_lens.dtype), "all queries but the last")


def _with_queries(record: Any, rows: list[np.ndarray], lengths: np.ndarray, how: str) -> Change:
    index = np.concatenate(rows)
    starts = np.cumsum([0, *map(len, rows)]).astype(record.query_start.dtype)
    changed = dataclasses.replace(record, query=record.query[index], query_start=starts, kv_lens=lengths)
    return Change("chunking", how, changed, ((take(index), whole),) * 2)


def changes_of_groups(family: Family, record: Any) -> Iterator[Change]:
    """Yields grouped matmuls of some of the rows: every third one, and one alone."""
    indices = getattr(record, "indices", None)
    rows = record.lhs.shape[0] if indices is None else indices.shape[0]
    sizes = np.maximum(record.group_sizes, 0)
    group = np.repeat(np.arange(sizes.size), sizes)[:rows]
    for how, index in (("each third row", np.arange(0, group.size, 3)), ("one row", np.array([group.size // 2]))):
        if group.size < 2:
            return
        changed = with_axis(family, record, "m", index, rows)
        counts = np.bincount(group[index], minlength=sizes.size).astype(record.group_sizes.dtype)
        yield Change("batch", how, dataclasses.replace(changed, group_sizes=counts), ((take(index), whole),))


def changes_of_routing(family: Family, record: Any) -> Iterator[Change]:
    """Yields routings of some of the tokens, whose experts are compared: places and sizes count all tokens."""
    tokens = record.logits.shape[0]
    if tokens < 2:
        return
    for how, index in (("the last token alone", [tokens - 1]), ("in reverse", np.arange(tokens)[::-1])):
        changed = with_axis(family, record, "t", np.asarray(index), tokens)
        yield Change("batch", how, changed, ((take(index), whole),))


CHANGES_BY_FAMILY: Mapping[str, Callable[[Family, Any], Iterator[Change]]] = {
    "tiled_attention": changes_of_attention,
    "paged_attention": changes_of_pages,
    "grouped_matmul": changes_of_groups,
    "gated_grouped_matmul": changes_of_groups,
    "expert_routing": changes_of_routing,
    "quantized_matmul": functools.partial(changes_of_rows, letter="m"),
    "gather_reduce": functools.partial(changes_of_rows, letter="t"),
    "cross_entropy": functools.partial(changes_of_rows, letter="t"),
    "kl_divergence": functools.partial(changes_of_rows, letter="t"),
    "linear_recurrence": changes_of_recurrences,
    "selective_scan": changes_of_recurrences,
    "causal_convolution": changes_of_recurrences,
    "wkv": changes_of_recurrences,
    "recurrent_network": changes_of_networks,
    "token_sparse_attention": changes_of_lists,
    "indexer_loss": changes_of_lists,
    "segment_pooling": changes_of_pools,
    "lightning_indexer": changes_of_indexers,
    "selected_attention": changes_of_selections,
}
"""The functions that change the calls of a family, for families whose rows are not simply those of axis `b`."""
