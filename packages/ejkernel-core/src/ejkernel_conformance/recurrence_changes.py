"""Changed calls of recurrences that share tokens with a call."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.row_changes import Change, changes_of_rows, take, whole, with_axis


def changes_of_recurrences(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of a recurrence, whose outputs are those of tokens, and the final states."""
    if getattr(record, "cu_seqlens", None) is not None:
        yield from _with_a_sequence_alone(family, record)
        return
    yield from changes_of_rows(family, record)
    yield from _with_more_tokens(family, record)
    if getattr(record, "segment_ids", None) is not None:
        yield from _with_a_segment_alone(family, record)
    else:
        yield from _in_two_calls(family, record)


def changes_of_networks(family: Family, record: Any) -> Iterator[Change]:
    """Yields changed calls of a recurrent network, whose outputs are those of tokens, and the final states."""
    yield from changes_of_rows(family, record)
    directions, (tokens, lengths) = record.weight_hh.shape[1], (record.x.shape[1], record.seq_lengths)
    states = 2 if record.cell == "lstm" else 1
    if directions == 1 or lengths is not None:
        x = np.pad(record.x, ((0, 0), (0, 37), (0, 0)), constant_values=1)
        finals = ((whole, whole),) * (states if lengths is not None else 0)
        rows = ((whole, take(np.arange(tokens), 1)), *finals)
        yield Change("padding", "37 tokens more", dataclasses.replace(record, x=x), rows)
    if directions > 1 or lengths is not None or tokens < 2:
        return
    first, last = np.arange(tokens // 3 or 1), np.arange(tokens // 3 or 1, tokens)
    calls = [dataclasses.replace(record, x=record.x[:, at]) for at in (first, last)]
    yield Change("chunking", "the first tokens", calls[0], ((take(first, 1), whole),))
    names = ("initial_hidden", "initial_cell")[:states]
    rows = ((take(last, 1), whole), *((whole, whole),) * states)
    carried = tuple((name, n) for n, name in enumerate(names, 1))
    yield Change("chunking", "in two calls", calls[1], rows, calls[0], carried)


def _token_axes(family: Family, record: Any) -> dict[str, int]:
    """Returns the axis of tokens of each array that has one, except those that broadcast along it."""
    axes = {name: family.axes_of(record)[name].split() for name in array_fields(record)}
    found = {name: letters.index("t") for name, letters in axes.items() if "t" in letters}
    tokens = max(getattr(record, name).shape[axis] for name, axis in found.items())
    return {name: axis for name, axis in found.items() if getattr(record, name).shape[axis] == tokens}


def _num_tokens(family: Family, record: Any) -> int:
    name, axis = next(iter(_token_axes(family, record).items()))
    return getattr(record, name).shape[axis]


def _with_more_tokens(family: Family, record: Any) -> Iterator[Change]:
    """Yields a call whose rows have 37 more tokens after those that are compared."""
    tokens, more = _num_tokens(family, record), 37
    if tokens == 1:
        return  # an axis of size 1 may be one that broadcasts
    changes = {}
    for name, axis in _token_axes(family, record).items():
        x = getattr(record, name)
        width = [(0, more if n == axis else 0) for n in range(x.ndim)]
        changes[name] = np.pad(x, width, constant_values=-1)
    select = take(np.arange(tokens), 1)
    yield Change("padding", f"{more} tokens more", dataclasses.replace(record, **changes), ((whole, select),))


def _in_two_calls(family: Family, record: Any) -> Iterator[Change]:
    """Yields calls of the first tokens, and calls of the others from the states that those leave."""
    tokens = _num_tokens(family, record)
    if tokens < 2 or getattr(record, "parents", None) is not None:
        return
    for count in {tokens // 3 or 1, tokens - 1}:
        first, last = np.arange(count), np.arange(count, tokens)
        before = with_axis(family, record, "t", first, tokens)
        yield Change("chunking", f"the first {count} tokens", before, ((take(first, 1), whole),))
        after = with_axis(family, record, "t", last, tokens)
        rows = ((take(last, 1), whole), (whole, whole))
        yield Change("chunking", f"in two calls, {count} tokens in the first", after, rows, before)


def _with_a_segment_alone(family: Family, record: Any) -> Iterator[Change]:
    """Yields a call of the last segment of the first row, cut out of the row."""
    ids, (batch, tokens) = record.segment_ids[0], record.segment_ids.shape
    real = ids[ids >= 0]
    if not real.size or (real == real[-1]).all() or tokens == 1:
        return
    index = np.flatnonzero(ids == real[-1])
    alone = dataclasses.replace(record, initial_state=None)
    for letter, at, size in (("b", np.array([0]), batch), ("t", index, tokens)):
        alone = with_axis(family, alone, letter, at, size)
    yield Change("packing", "a segment alone", alone, ((lambda x: x[:1][:, index], whole),))


def _with_a_sequence_alone(family: Family, record: Any) -> Iterator[Change]:
    """Yields a call of the longest packed sequence alone."""
    starts, tokens = record.cu_seqlens, _num_tokens(family, record)
    n = int(np.diff(starts).argmax())
    index, count = np.arange(starts[n], starts[n + 1]), starts.size - 1
    if tokens == 1 or not index.size or getattr(record, "parents", None) is not None:
        return
    changes: dict[str, Any] = {"cu_seqlens": np.array([0, index.size], starts.dtype)}
    slots = getattr(record, "state_slots", None)
    for name in ("initial_state", "sequence_state", "state_slots"):
        x = getattr(record, name, None)
        if x is not None and (slots is None or name == "state_slots") and x.shape[0] == count:
            changes[name] = x[n : n + 1]
    alone = dataclasses.replace(with_axis(family, record, "t", index, tokens), **changes)
    # With slots, the final states are those of all slots.
    states = ((take([n]), whole),) if slots is None else ()
    yield Change("packing", "a sequence alone", alone, ((take(index, 1), whole), *states))
