"""Sentences for `explain` about conventions in which libraries differ: windows, alignment and scales."""

from collections.abc import Iterable
from typing import Any

from ejkernel.modules.operations.shared.recurrences import rank

Window = tuple[int | None, int | None]


def window_sentence(window: Window, causal: bool) -> str:
    """Says how many keys a window keeps for a query, and where they are."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    sides = []
    if left != 0:
        sides.append("all to the left" if left is None else f"{left} to the left")
    sides.append("its own")
    if right != 0:
        sides.append("all to the right" if right is None else f"{right} to the right")
    where = sides[0] if len(sides) == 1 else f"{', '.join(sides[:-1])} and {sides[-1]}"
    count = "" if left is None or right is None else f" {left + right + 1}"
    plural = "key" if count == " 1" else "keys"
    with_causal = " with causal=True" if causal else ""
    return f"sliding_window={window}{with_causal} keeps{count} {plural}: {where}"


def dense_sentences(tokens_axis: int = 1) -> Any:
    """Returns the sentences of an operation on dense queries and keys.

    Args:
        tokens_axis: Their axis of tokens.
    """

    def conventions(args: Any) -> Iterable[str]:
        if min(rank(args.query), rank(args.key)) < 4 or getattr(args, "block_tables", None) is not None:
            return
        if args.sliding_window is not None:
            yield window_sentence(args.sliding_window, args.causal)
        queries, keys = args.query.shape[tokens_axis], args.key.shape[tokens_axis]
        placed = getattr(args.mask_info, "q_positions", None) is not None
        if args.causal and queries != keys and not placed and getattr(args, "cum_seqlens_q", None) is None:
            yield (
                f"causal=True is top-left: query 0 sees key 0 of {keys}; to align the last query with the last key, "
                f"pass mask_info=MaskInfo.decode({queries}, {keys})"
            )

    return conventions


def page_sentences(args: Any) -> Iterable[str]:
    """Yields the sentences of an operation over pages: an int window counts the query's own key."""
    if args.sliding_window is not None:
        yield window_sentence(args.sliding_window, causal=False)


def unscaled_page_sentences(args: Any) -> Iterable[str]:
    """Yields those of an operation whose scale is 1 by default."""
    yield from page_sentences(args)
    if args.softmax_scale == 1 and rank(args.queries) == 3:
        size = args.queries.shape[-1]
        yield f"softmax_scale=1.0, the default here, leaves scores as they are; None is {size} ** -0.5"
