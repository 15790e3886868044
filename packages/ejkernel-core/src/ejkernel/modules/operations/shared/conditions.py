"""Conditions on the lengths, starts, counts, tables and slots of a call, as `ejkernel.ops.values.Condition`s.

Each function yields conditions only for arrays of the right shapes, since `validate` raises errors for all others.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ejkernel.ops.values import Condition, are_integer_arrays


def have_ranks(args: Any, **ranks: int) -> bool:
    """Returns whether arguments, by name, are arrays of so many axes."""
    return all(len(getattr(getattr(args, name), "shape", ())) == rank for name, rank in ranks.items())


def cumulative_length_conditions(name: str, lengths: Any, rows: int, size: int) -> Iterable[Condition]:
    """Yields that cumulative lengths start at 0, never decrease, and end within `size` tokens; each step with rows > 1.

    The argument record checks values that can be read, by `shapes.check_cumulative_lengths`.
    """
    if not are_integer_arrays(lengths) or len(lengths.shape) != 1 or not lengths.shape[0]:
        return

    def lengths_are_cumulative(xp: Any, bounds: Any) -> Any:
        steps = bounds[1:] - bounds[:-1]
        last = bounds[-1] if rows == 1 else steps
        return (bounds[0] == 0) & xp.all(steps >= 0) & xp.all(last <= size)

    within = f"end within {size} tokens" if rows == 1 else f"have steps of at most {size} tokens"
    wants = f"lengths that start at 0, never decrease and {within}"
    yield Condition(name=name, arrays=(lengths,), holds=lengths_are_cumulative, wants=wants, is_checked_by_record=True)


def conditions_of_cumulative_lengths(name: str, tokens_argument: str, tokens_axis: int = 1) -> Any:
    """Returns the conditions of an operation with one array of cumulative lengths.

    Args:
        name: The argument that holds them.
        tokens_argument: An argument with a row or rows of tokens, [B, T, ...] or [T, ...].
        tokens_axis: Its axis of tokens.
    """

    def conditions(args: Any) -> Iterable[Condition]:
        bounds: Any = getattr(args, name)
        shape: Any = getattr(getattr(args, tokens_argument), "shape", ())
        axis = tokens_axis % max(len(shape), 1)
        if bounds is not None and len(shape) > axis:
            yield from cumulative_length_conditions(name, bounds, shape[0] if axis else 1, shape[axis])

    return conditions


def conditions_of_states(
    tokens_argument: str,
    tokens_axis: int = 1,
    lengths_argument: str = "cu_seqlens",
    states_argument: str = "initial_state",
) -> Any:
    """Returns the conditions of a recurrence: its cumulative lengths, and slots of its states where it has
    `state_indices`.

    Args:
        tokens_argument: An argument with the tokens.
        tokens_axis: Its axis of tokens.
        lengths_argument: The argument with the cumulative lengths.
        states_argument: The argument with the slots.
    """
    of_tokens = conditions_of_cumulative_lengths(lengths_argument, tokens_argument, tokens_axis)

    def conditions(args: Any) -> Iterable[Condition]:
        yield from of_tokens(args)
        yield from slot_conditions(args.state_indices, getattr(args, lengths_argument), getattr(args, states_argument))

    return conditions


def conditions_of_trees(other_conditions: Any, lengths_argument: str = "cu_seqlens") -> Any:
    """Returns the conditions of an operation that verifies draft trees: `other_conditions`, and that each token's
    parent comes before it in its own request.

    Args:
        other_conditions: The operation's other conditions.
        lengths_argument: The argument with the cumulative lengths of packed requests.
    """

    def conditions(args: Any) -> Iterable[Condition]:
        yield from other_conditions(args)
        if args.parents is not None:
            yield from tree_conditions(args.parents, getattr(args, lengths_argument))

    return conditions


def tree_conditions(parents: Any, bounds: Any) -> Iterable[Condition]:
    """Yields that every token's parent is an earlier token of its own request, or -1.

    Args:
        parents: [B, T], or [T] of packed requests.
        bounds: Cumulative lengths of packed requests; None where each row is a request.
    """
    packed = () if bounds is None else (bounds,)
    if not are_integer_arrays(parents, *packed) or any(len(x.shape) != 1 or x.shape[0] < 2 for x in packed):
        return

    def parents_come_first(xp: Any, values: Any, *lengths: Any) -> Any:
        token = xp.arange(values.shape[-1])
        if not lengths:
            return xp.all((values >= -1) & (values < token))
        ends = lengths[0]
        sequence = xp.minimum(xp.searchsorted(ends[1:], token, side="right"), ends.shape[0] - 2)
        padding = (token < ends[0]) | (token >= ends[-1])
        return xp.all(padding | ((values >= -1) & (values < token - ends[sequence])))

    wants = "for every token the index of an earlier token of its own request, or -1 for the request's state"
    yield Condition(name="parents", arrays=(parents, *packed), holds=parents_come_first, wants=wants)


def conditions_of_row_lengths(args: Any) -> Iterable[Condition]:
    """Yields the conditions of a recurrent network: no row has more tokens than x."""
    if have_ranks(args, x=3, seq_lengths=1):
        yield from value_range_condition("seq_lengths", args.seq_lengths, 0, args.x.shape[1], "lengths")


def value_range_condition(
    name: str, values: Any, minimum: int, maximum: int, value_description: str, traced_only: bool = False
) -> Iterable[Condition]:
    """Yields the condition that all integers of an array are from `minimum` to `maximum`."""
    if are_integer_arrays(values):
        wants = f"{value_description} from {minimum} to {maximum}"
        yield Condition(
            name=name,
            arrays=(values,),
            holds=lambda xp, x: xp.all((x >= minimum) & (x <= maximum)),
            wants=wants,
            is_checked_by_record=traced_only,
        )


class PagedBatch(NamedTuple):
    """The arguments of packed sequences over a cache of pages, by name and value.

    Attributes:
        lengths: Tokens of each sequence, [N].
        starts: First query row of each, [N + 1].
        tables: Pages, [N, K] or [N * K].
        rows: Query rows.
        page_size: Slots of a page.
        num_live: How many of the sequences are live: a scalar, or the last entry of an array; None for all.
    """

    lengths: tuple[str, Any]
    starts: tuple[str, Any]
    tables: tuple[str, Any]
    rows: int
    page_size: int
    num_live: tuple[str, Any] | None = None


def paged_batch_conditions(call: PagedBatch) -> Iterable[Condition]:
    """Starts, lengths, the number of live sequences and tables fit each other, the query rows and the cache."""
    (length_name, lengths), (start_name, starts), (table_name, tables) = call.lengths, call.starts, call.tables
    live = () if call.num_live is None else (call.num_live[1],)
    if not are_integer_arrays(lengths, starts, tables, *live) or len(lengths.shape) != 1 or 0 in (x.size for x in live):
        return
    sequences = lengths.shape[0]
    if starts.shape != (sequences + 1,) or (len(tables.shape) == 2 and tables.shape[0] != sequences):
        return
    entries = tables.shape[1] if len(tables.shape) == 2 else tables.shape[0] // max(sequences, 1)
    capacity = entries * call.page_size
    if call.num_live is not None:
        yield from _live_count_conditions(call.num_live, sequences)

    def starts_in_order(xp: Any, bounds: Any, *live_counts: Any) -> Any:
        first, last, rest = bounds[:-1], bounds[1:], _sequences_not_live(xp, sequences, live_counts)
        return xp.all(rest | ((first >= 0) & (first <= last) & (last <= call.rows)))

    def covers_query_rows(xp: Any, tokens: Any, bounds: Any, *live_counts: Any) -> Any:
        return xp.all(
            _sequences_not_live(xp, sequences, live_counts) | (tokens >= xp.maximum(bounds[1:] - bounds[:-1], 0))
        )

    def fits_page_tables(xp: Any, tokens: Any, *live_counts: Any) -> Any:
        return xp.all(_sequences_not_live(xp, sequences, live_counts) | (tokens <= capacity))

    up_to = f" up to the live sequences of {call.num_live[0]}" if call.num_live else ""
    wants = f"starts from 0 to {call.rows}, the number of query rows, that never decrease{up_to}"
    yield Condition(name=start_name, arrays=(starts, *live), holds=starts_in_order, wants=wants)
    wants = f"at least as many tokens as query rows by {start_name}, for each sequence: these are its newest tokens"
    yield Condition(name=length_name, arrays=(lengths, starts, *live), holds=covers_query_rows, wants=wants)
    wants = f"at most {capacity} tokens: {table_name} has {entries} pages of {call.page_size}"
    yield Condition(name=length_name, arrays=(lengths, *live), holds=fits_page_tables, wants=wants)


def _sequences_not_live(xp: Any, num_sequences: int, live_counts: tuple[Any, ...]) -> Any:
    """Returns which sequences are not live, bool [N]; `live_counts` is empty where all are."""
    if not live_counts:
        return xp.zeros(num_sequences, bool)
    return xp.arange(num_sequences) >= xp.reshape(live_counts[0], (-1,))[-1]


def _live_count_conditions(num_live: tuple[str, Any], num_sequences: int) -> Iterable[Condition]:
    name, counts = num_live

    def counts_are_valid(xp: Any, values: Any) -> Any:
        values = xp.reshape(values, (-1,))
        return (values[0] >= 0) & xp.all(values[1:] >= values[:-1]) & (values[-1] <= num_sequences)

    ascending = "numbers that never decrease" if len(counts.shape) == 1 and counts.shape[0] > 1 else "a number"
    wants = f"{ascending} from 0 to the {num_sequences} sequences"
    yield Condition(name=name, arrays=(counts,), holds=counts_are_valid, wants=wants)


def shared_prefix_conditions(
    prefix_length: Any,
    lengths: tuple[str, Any],
    table_capacity: int,
    starts: tuple[str, Any] | None = None,
    num_live: tuple[str, Any] | None = None,
) -> Iterable[Condition]:
    """Yields that all live sequences with query rows begin with the prefix, and that none of their queries is in it.

    Args:
        prefix_length: The argument `shared_prefix`.
        lengths: Tokens of each sequence, [N], with the argument's name.
        table_capacity: Tokens that a table has pages for.
        starts: First query row of each, [N + 1]; None where every sequence with tokens has one.
        num_live: How many of the sequences are live: a scalar, or the last entry of an array; None for all.
    """
    arrays = tuple(array for _, array in filter(None, (lengths, starts)))
    counts = () if num_live is None else (num_live[1],)
    sequences = getattr(lengths[1], "shape", (0,))[0]
    if not are_integer_arrays(prefix_length, *arrays, *counts) or (
        starts is not None and starts[1].shape != (sequences + 1,)
    ):
        return

    def prefix_fits(xp: Any, count: Any, tokens: Any, *starts_and_live_counts: Any) -> Any:
        rows = (
            xp.minimum(tokens, 1) if starts is None else starts_and_live_counts[0][1:] - starts_and_live_counts[0][:-1]
        )
        idle = _sequences_not_live(xp, sequences, starts_and_live_counts[len(arrays) - 1 :]) | (rows <= 0)
        return (count >= 0) & (count <= table_capacity) & xp.all(idle | (count <= tokens - rows))

    wants = (
        f"0 to {table_capacity} tokens, which the pages of a table hold, and at most {lengths[0]} minus the query rows "
        "of each sequence"
    )
    yield Condition(name="shared_prefix", arrays=(prefix_length, *arrays, *counts), holds=prefix_fits, wants=wants)


def packed_qq_bias_conditions(
    num_entries: int, starts: tuple[str, Any], num_live: tuple[str, Any] | None
) -> Iterable[Condition]:
    """Yields that a packed `qq_bias` has the table of every live sequence.

    Args:
        num_entries: Its entries.
        starts: First query row of each sequence, [N + 1], with the argument's name.
        num_live: How many of the sequences are live: a scalar, or the last entry of an array; None for all.
    """
    name, bounds = starts
    counts = () if num_live is None else (num_live[1],)
    if not are_integer_arrays(bounds, *counts) or len(bounds.shape) != 1 or 0 in (x.size for x in counts):
        return

    def tables_fit(xp: Any, first: Any, *live_counts: Any) -> Any:
        rows = xp.maximum(first[1:] - first[:-1], 0)
        rows = xp.where(_sequences_not_live(xp, first.shape[0] - 1, live_counts), 0, rows)
        # A sequence with more rows than the root of the entries is too long alone, so no square overflows int32.
        most = math.isqrt(num_entries)
        return xp.all(rows <= most) & xp.all(xp.cumsum(xp.minimum(rows, most) ** 2) <= num_entries)

    wants = f"at most {num_entries}, the entries of qq_bias, as the sum of the squared query rows of each sequence"
    yield Condition(name=name, arrays=(bounds, *counts), holds=tables_fit, wants=wants)


def slot_conditions(indices: Any, bounds: Any, states: Any, name: str = "state_indices") -> Iterable[Condition]:
    """Sequences with tokens have different slots; an index that is no slot may be repeated."""
    if (
        not are_integer_arrays(indices, bounds)
        or not getattr(states, "shape", ())
        or bounds.shape != (indices.shape[0] + 1,)
    ):
        return
    count = states.shape[0]

    def slots_differ(xp: Any, slot_indices: Any, cumulative_lengths: Any) -> Any:
        stored = (cumulative_lengths[1:] > cumulative_lengths[:-1]) & (slot_indices >= 0) & (slot_indices < count)
        ordered = xp.sort(xp.where(stored, slot_indices, -1))
        return xp.all((ordered[1:] != ordered[:-1]) | (ordered[1:] < 0))

    wants = "different slots for sequences that have tokens"
    yield Condition(name=name, arrays=(indices, bounds), holds=slots_differ, wants=wants)


def group_size_conditions(sizes: Any, rows: int, array: str) -> Iterable[Condition]:
    """Sizes of groups are not negative, and there are rows for all of them."""
    if not are_integer_arrays(sizes) or len(sizes.shape) != 1:
        return
    yield from _not_negative_condition("group_sizes", sizes)
    wants = f"a sum of at most the {rows} rows of {array}"
    yield Condition(name="group_sizes", arrays=(sizes,), holds=lambda xp, x: xp.sum(x) <= rows, wants=wants)


def _not_negative_condition(name: str, values: Any) -> Iterable[Condition]:
    yield Condition(name=name, arrays=(values,), holds=lambda xp, x: xp.all(x >= 0), wants="sizes of at least 0")


def same_pairs_condition(indices: Any, inverse: Any) -> Iterable[Condition]:
    """Yields that each row of `inverse` lists all pairs of `indices` that name this row, each once.

    The record checks concrete arrays.
    """
    if not are_integer_arrays(indices, inverse):
        return
    rows, count = inverse.shape[0], indices.shape[0] * indices.shape[1]

    def pairs_match(xp: Any, pairs: Any, named_rows: Any) -> Any:
        named_rows, owner = named_rows.reshape(-1), xp.broadcast_to(xp.arange(rows)[:, None], pairs.shape).reshape(-1)
        pairs = pairs.reshape(-1)
        listed = (pairs >= 0) & (pairs < count)
        right = xp.where(listed, named_rows[xp.where(listed, pairs, 0)] == owner, True) if count else ~listed
        ordered = xp.sort(xp.where(listed, pairs, -1))
        once = (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0)
        return xp.all(right) & xp.all(once) & (xp.sum(listed) == xp.sum((named_rows >= 0) & (named_rows < rows)))

    wants = "in each row, all pairs of indices that name this row, each once"
    yield Condition(
        name="inverse", arrays=(inverse, indices), holds=pairs_match, wants=wants, is_checked_by_record=True
    )
