"""Packed sequences of a selective scan: the sequence of every token, and where states are stored between intervals.

A kernel begins each sequence with the sequence's own state, and reads no token of another: nothing is multiplied away,
so what one sequence holds, NaN or infinity, stays there. Intervals of `TOKENS_PER_INTERVAL` tokens count from the
first token of each sequence; the states before them are stored one after the other, those of sequence n from number
`first[n]` on:

    tokens      | sequence 0                 | sequence 1 |    | sequence 3                          |
    intervals   |  0           |  1          |  2         |    |  3           |  4           |  5    |

    first = 0 2 3 3 6
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv

TOKENS_PER_INTERVAL = 64
"""Tokens between the states that a forward pass leaves for the backward pass."""


class IntervalTable(NamedTuple):
    """The intervals of packed sequences. The arrays have room for the most intervals that any lengths need; used
    entries come first. All int32.

    Attributes:
        sequence: [J], the sequence of each interval; N for an unused entry.
        begin: [J], the first token of each interval.
        end: [J], the token after the sequence's last.
        starts_sequence: bool [J], whether the interval is the first of its sequence.
        ends_sequence: bool [J], whether the interval is the last of its sequence.
    """

    sequence: jax.Array
    begin: jax.Array
    end: jax.Array
    starts_sequence: jax.Array
    ends_sequence: jax.Array


def max_num_intervals(tokens: int, num_sequences: int) -> int:
    """Returns the most intervals that so many packed sequences of together so many tokens have."""
    return tokens // TOKENS_PER_INTERVAL + num_sequences


def first_interval_of_sequences(cu_seqlens: jax.Array) -> jax.Array:
    """Returns the number of every sequence's first interval, and of the one after the last; [N + 1] int32."""
    lengths = jnp.maximum(jnp.diff(cu_seqlens.astype(jnp.int32)), 0)
    return jnp.pad(jnp.cumsum(cdiv(lengths, TOKENS_PER_INTERVAL), dtype=jnp.int32), (1, 0))


def make_interval_table(cu_seqlens: jax.Array, tokens: int) -> IntervalTable:
    """Returns the intervals of packed sequences.

    Args:
        cu_seqlens: [N + 1] int, cumulative lengths.
        tokens: Tokens of the row.
    """
    bounds, first = cu_seqlens.astype(jnp.int32), first_interval_of_sequences(cu_seqlens)
    sequences = bounds.shape[0] - 1
    number = jnp.arange(max_num_intervals(tokens, sequences), dtype=jnp.int32)
    # Counts the sequences whose intervals all come before; this skips empty sequences.
    sequence = jnp.searchsorted(first[1:], number, side="right").astype(jnp.int32)
    at = jnp.minimum(sequence, max(0, sequences - 1))
    begin = bounds[at] + (number - first[at]) * TOKENS_PER_INTERVAL
    opens, closes = number == first[at], number == first[at + 1] - 1
    return IntervalTable(sequence, begin, bounds[at + 1], opens, closes)


def zero_unused_states(cu_seqlens: jax.Array, states: jax.Array) -> jax.Array:
    """Returns states before intervals [1, J, ...] as a kernel stored them: 0 for intervals that no sequence has."""
    used = jnp.arange(states.shape[1], dtype=jnp.int32) < first_interval_of_sequences(cu_seqlens)[-1]
    return jnp.where(used.reshape(1, -1, *(1,) * (states.ndim - 2)), states, 0)
