"""Chunks of packed sequences: every sequence has whole chunks of its own, and a table names the sequence of each chunk.

    tokens      | sequence 0          | 1 |    | sequence 3        |
    chunks      |  0       |  1       |  2  |  |  3       |  4       |      sequence  0 0 1 3 3

Tables are in scalar memory, where index maps and kernels read them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv


class ChunkPositions(NamedTuple):
    """Where the kernels' arrays have the tokens of packed sequences, each of which has whole chunks.

    Attributes:
        token_at_position: int32 [T'], the token at each position; T where a position holds no token.
        position_of_token: int32 [T], the position of each token.
        sequence_of_chunk: int32 [chunks], the sequence of each chunk; for unused chunks, that of the last used
            one.
        num_used_chunks: int32 scalar, the number of chunks with tokens; at least 1.
    """

    token_at_position: jax.Array
    position_of_token: jax.Array
    sequence_of_chunk: jax.Array
    num_used_chunks: jax.Array


def make_chunk_positions(sequence_bounds: jax.Array, num_tokens: int, chunk_tokens: int) -> ChunkPositions:
    """Returns the positions of tokens that give every sequence whole chunks.

    Args:
        sequence_bounds: int32 [N + 1], the first token of each sequence, and the end of the last one.
        num_tokens: T, tokens of the packed row, with its padding.
        chunk_tokens: Tokens per chunk.
    """
    lengths = jnp.diff(sequence_bounds)
    chunks_per_sequence = cdiv(lengths, chunk_tokens)
    end_chunks = jnp.cumsum(chunks_per_sequence, dtype=jnp.int32)
    # A sequence with tokens has one chunk, and one more for each `chunk_tokens` tokens after its first.
    max_started_sequences = min(lengths.shape[0], num_tokens)
    num_chunks = max_started_sequences + (num_tokens - max_started_sequences) // chunk_tokens
    chunk_index = jnp.arange(num_chunks, dtype=jnp.int32)
    sequence_of_chunk = jnp.minimum(
        jnp.searchsorted(end_chunks, chunk_index, side="right").astype(jnp.int32), lengths.shape[0] - 1
    )
    # Unused chunks are assigned to the last sequence with tokens, and have none.
    sequence_of_chunk = jnp.where(
        chunk_index < end_chunks[-1],
        sequence_of_chunk,
        jnp.max(jnp.where(chunk_index < end_chunks[-1], sequence_of_chunk, 0)),
    )
    first_chunks = end_chunks - chunks_per_sequence
    offset = (chunk_index - first_chunks[sequence_of_chunk])[:, None] * chunk_tokens + jnp.arange(
        chunk_tokens, dtype=jnp.int32
    )
    token_at_position = jnp.where(
        offset < lengths[sequence_of_chunk][:, None],
        sequence_bounds[:-1][sequence_of_chunk][:, None] + offset,
        num_tokens,
    ).reshape(-1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence_of_token = jnp.clip(
        jnp.searchsorted(sequence_bounds, token, side="right").astype(jnp.int32) - 1, 0, lengths.shape[0] - 1
    )
    position_of_token = jnp.where(
        token < sequence_bounds[-1],
        first_chunks[sequence_of_token] * chunk_tokens + token - sequence_bounds[:-1][sequence_of_token],
        num_chunks * chunk_tokens,
    )
    return ChunkPositions(token_at_position, position_of_token, sequence_of_chunk, jnp.maximum(end_chunks[-1], 1))


def chunk_table(token_positions: ChunkPositions) -> jax.Array:
    """Returns the table of packed chunks.

    A sequence's last chunk may have chunks without tokens after it: the last of these is marked too, for kernels that
    run them. Entries are `4 * sequence + 2 * is_first + is_last`.
    """
    sequence_of_chunk = token_positions.sequence_of_chunk
    is_new_owner = sequence_of_chunk[1:] != sequence_of_chunk[:-1]
    one = jnp.ones(1, bool)
    first, last = jnp.concatenate([one, is_new_owner]), jnp.concatenate([is_new_owner, one])
    last = last | (jnp.arange(sequence_of_chunk.shape[0], dtype=jnp.int32) == token_positions.num_used_chunks - 1)
    return 4 * sequence_of_chunk + 2 * first.astype(jnp.int32) + last.astype(jnp.int32)


def slot_table(token_positions: ChunkPositions, slot_of_sequence: jax.Array, num_slots: int) -> jax.Array:
    """Returns the table of packed chunks whose states are in slots.

    A sequence without a slot names that of the sequence before it, and sequences before the first one with a slot name
    that one: the block of a slot is then copied once, and a step that keeps nothing leaves it as it is.

    Args:
        token_positions: The positions of tokens.
        slot_of_sequence: int [N], the slot of each sequence; a sequence whose index is out of range has none.
        num_slots: The number of slots.

    Returns:
        int32 [chunks], `8 * slot + 4 * has_slot + 2 * is_first + is_last`.
    """
    sequence_of_chunk = token_positions.sequence_of_chunk
    slot = slot_of_sequence.astype(jnp.int32)[sequence_of_chunk]
    has_slot = (slot >= 0) & (slot < num_slots)
    chunk = jnp.arange(sequence_of_chunk.shape[0], dtype=jnp.int32)
    nearest_kept_chunk = jnp.maximum(lax.cummax(jnp.where(has_slot, chunk, -1)), jnp.argmax(has_slot))
    slot = jnp.clip(slot[nearest_kept_chunk], 0, num_slots - 1)
    return 8 * slot + 4 * has_slot.astype(jnp.int32) + chunk_table(token_positions) % 4
