"""Chunks of packed sequences: every sequence has whole chunks of its own, and a table says whose each chunk is.

    tokens      | sequence 0          | 1 |    | sequence 3        |
    chunks      |  0       |  1       |  2  |  |  3       |  4       |      owner  0 0 1 3 3

Tables lie in scalar memory, where index maps and kernels read them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv


class Places(NamedTuple):
    """The positions of tokens in the kernels' arrays, for packed sequences.

    Attributes:
        source: int32 [T'] the token at each position; T if there is none.
        target: int32 [T] the position of each token.
        owner: int32 [chunks] the sequence of each chunk; that of the last chunk with tokens for later ones.
        used: int32 scalar, chunks with tokens; at least 1.
    """

    source: jax.Array
    target: jax.Array
    owner: jax.Array
    used: jax.Array


def chunk_places(bounds: jax.Array, tokens: int, chunk: int) -> Places:
    """Returns the positions of tokens that give every sequence whole chunks."""
    lengths = jnp.diff(bounds)
    counts = cdiv(lengths, chunk)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # A sequence with tokens has one chunk, and one more for each `chunk` tokens after its first.
    max_started_sequences = min(lengths.shape[0], tokens)
    chunks = max_started_sequences + (tokens - max_started_sequences) // chunk
    number = jnp.arange(chunks, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, number, side="right").astype(jnp.int32), lengths.shape[0] - 1)
    # Unused chunks are assigned to the last sequence with tokens, and have none.
    owner = jnp.where(number < ends[-1], owner, jnp.max(jnp.where(number < ends[-1], owner, 0)))
    begin = ends - counts
    offset = (number - begin[owner])[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
    source = jnp.where(offset < lengths[owner][:, None], bounds[:-1][owner][:, None] + offset, tokens).reshape(-1)
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence_of_token = jnp.clip(
        jnp.searchsorted(bounds, token, side="right").astype(jnp.int32) - 1, 0, lengths.shape[0] - 1
    )
    target = jnp.where(
        token < bounds[-1], begin[sequence_of_token] * chunk + token - bounds[:-1][sequence_of_token], chunks * chunk
    )
    return Places(source, target, owner, jnp.maximum(ends[-1], 1))


def chunk_table(places: Places) -> jax.Array:
    """Returns the table of packed chunks.

    A sequence's last chunk may have chunks without tokens after it: the last of these is marked too, for kernels that
    run them. Entries are `4 * owner + 2 * is_first + is_last`.
    """
    owner = places.owner
    is_new_owner = owner[1:] != owner[:-1]
    one = jnp.ones(1, bool)
    first, last = jnp.concatenate([one, is_new_owner]), jnp.concatenate([is_new_owner, one])
    last = last | (jnp.arange(owner.shape[0], dtype=jnp.int32) == places.used - 1)
    return 4 * owner + 2 * first.astype(jnp.int32) + last.astype(jnp.int32)


def slot_table(places: Places, indices: jax.Array, slots: int) -> jax.Array:
    """Returns the table of packed chunks whose states are in slots.

    A sequence without a slot names that of the sequence before it, and sequences before the first one with a slot name
    that one: the block of a slot is then copied once, and a step that keeps nothing leaves it as it is.

    Args:
        places: The positions of tokens.
        indices: [N] int, the slot of each sequence.
        slots: The number of slots.

    Returns:
        int32 [chunks], `8 * slot + 4 * keeps + 2 * is_first + is_last`.
    """
    owner = places.owner
    slot = indices.astype(jnp.int32)[owner]
    keeps = (slot >= 0) & (slot < slots)
    chunk = jnp.arange(owner.shape[0], dtype=jnp.int32)
    nearest_kept_chunk = jnp.maximum(lax.cummax(jnp.where(keeps, chunk, -1)), jnp.argmax(keeps))
    slot = jnp.clip(slot[nearest_kept_chunk], 0, slots - 1)
    return 8 * slot + 4 * keeps.astype(jnp.int32) + chunk_table(places) % 4
