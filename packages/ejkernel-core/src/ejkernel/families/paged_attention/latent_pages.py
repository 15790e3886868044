"""Caches of latent vectors as pages: a dense cache is one with a page for each sequence.

`mla_decode` lowers to tiled attention, whose gradients it has; a paged kernel that serves it leaves the residuals of
that family, so that any backward pass of it serves.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.record import PagedAttention
from ejkernel.families.tiled_attention import TiledAttention

MAX_KEY_BLOCK_WIDTH = 512
"""Columns that one accumulator has. Of wider rows that are keys and values, the rest goes to a second one."""


@dataclasses.dataclass(frozen=True)
class RotaryColumns:
    """The location of the rotary columns, the key columns that are not part of the latent vector.

    Attributes:
        rows: [P, S, L], the latent cache itself or another.
        start: The first rotary column in a row.
        are_values: Whether the rotary columns are also values.
    """

    rows: jax.Array
    start: int
    are_values: bool = False


def rotary_columns_of(record: PagedAttention) -> RotaryColumns | None:
    """Returns the rotary part of a latent record; None for other records."""
    return None if record.latent is None else RotaryColumns(record.key_pages, record.latent[1])


def as_paged_record(record: TiledAttention) -> tuple[PagedAttention, RotaryColumns]:
    """Returns a record of dense latent caches as a paged one, of one page per sequence, and its rotary columns.

    With two caches, the values are the latent one; the keys are both, joined. Their rotary columns are sliced off
    again, which XLA makes the rotary cache itself: nothing is copied. With one cache, values are all of its columns.
    """
    keys, values = record.key[:, :, 0], record.value[:, :, 0]
    if values.shape[-1] < keys.shape[-1]:
        size = values.shape[-1]
        rows, rotary = values, RotaryColumns(keys[..., size:], 0)
    else:
        size = min(keys.shape[-1], MAX_KEY_BLOCK_WIDTH)
        rows, rotary = keys, RotaryColumns(keys, size % keys.shape[-1], are_values=size < keys.shape[-1])
    starts, lengths = _key_ranges(record)
    pages = PagedAttention(
        query=record.query[:, 0],
        key_pages=rows,
        value_pages=None,
        block_tables=None,
        kv_lens=lengths,
        query_start=None,
        softmax_scale=record.softmax_scale,
        kv_layout=paged_cache.LATENT_LAYOUT,
        kv_heads=None,
        kv_starts=starts,
        softmax_aux=record.softmax_aux,
        logits_soft_cap=record.logits_soft_cap,
        latent=(size, rotary.start),
    )
    return pages, rotary


def _key_ranges(record: TiledAttention) -> tuple[jax.Array | None, jax.Array]:
    """Returns first key of each row, None for 0, and one more than the last: what segments and the window leave of its
    tokens.

    `mla_decode` says in segments of keys how many tokens a row has; XLA sums comparisons and makes no such array.
    """
    assert record.q_segment_ids is not None
    assert record.kv_segment_ids is not None
    tokens = jnp.sum(record.kv_segment_ids >= 0, axis=1, dtype=jnp.int32)
    tokens = jnp.where(record.q_segment_ids[:, 0] >= 0, tokens, 0)
    if record.sliding_window is None or record.q_positions is None:
        return None, tokens
    (left, right), position = record.sliding_window, record.q_positions[:, 0]
    if right is not None:
        tokens = jnp.clip(position + right + 1, 0, tokens)
    # A padding query has no tokens, wherever its window begins; kernels need a start that is at most the end.
    return (None if left is None else jnp.clip(position - left, 0, tokens)), tokens
