"""How many tokens the decode steps of recurrences support."""

from collections.abc import Iterable

import jax

MAX_TOKENS_PER_SEQUENCE = 8
"""The largest number of tokens per sequence; for packed sequences, on average."""

MAX_EXTRA_TOKENS = 256
"""The largest number of tokens minus sequences in a packed call, for a decode step that processes the tokens of a
sequence one after another: one sequence may have all of them.
"""


def length_refusals(
    name: str, tokens: int, cu_seqlens: jax.Array | None, max_extra_tokens: int = MAX_EXTRA_TOKENS
) -> Iterable[str]:
    """Yields the reasons why a decode step refuses a call with so many tokens.

    Args:
        name: The argument with the tokens.
        tokens: Tokens of a row.
        cu_seqlens: [N + 1] bounds of packed sequences; None without packing.
        max_extra_tokens: The largest number of tokens minus sequences in a packed call.
    """
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if tokens > MAX_TOKENS_PER_SEQUENCE * sequences:
        limit = f"the decode step supports at most {MAX_TOKENS_PER_SEQUENCE} tokens per sequence"
        yield f"{name}: {tokens} tokens of {sequences} sequences; {limit}"
    if cu_seqlens is not None and tokens - sequences > max_extra_tokens:
        longest = f"one of {sequences} packed sequences may have {tokens - sequences + 1} tokens"
        yield f"{name}: {longest}; the decode step supports at most {max_extra_tokens + 1}"
