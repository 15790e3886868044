"""The arrays that the kernel reads: lists of blocks, ranges of keys, and queries, keys and values."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, num_keys, query_positions
from ejkernel.planning.page_slots import has_page
from ejkernel.types.integers import clamp_to_int32
from ejkernel_pallas.tpu.selected_attention_decode.config import NUM_BUFFERS
from ejkernel_pallas.tpu.selected_attention_decode.spec import BlockLists, SelectedDecodeSpec


def selected_lists(record: SelectedAttention) -> BlockLists:
    """Returns the lists of the selected branch of a record with `block_indices`."""
    assert record.block_indices is not None  # the caller has selected them
    ends = _end_keys(record)
    return BlockLists(_readable(record.block_indices, ends, record), ends, None)


def window_lists(record: SelectedAttention) -> BlockLists | None:
    """Returns the lists of the window branch: the blocks of the newest keys, the same for all heads; None if a record
    has no window.
    """
    if record.window_size is None:
        return None
    ends, positions = _end_keys(record), jnp.broadcast_to(query_positions(record), record.query.shape[:2])
    window = min(record.window_size, num_keys(record))
    firsts = jnp.maximum(positions - (window - 1), 0)
    count = min(cdiv(window - 1, record.block_size) + 1, cdiv(num_keys(record), record.block_size))
    blocks = (firsts // record.block_size)[..., None, None] + jnp.arange(count, dtype=jnp.int32)
    return BlockLists(_readable(blocks, ends, record), ends, firsts)


def _end_keys(record: SelectedAttention) -> jax.Array:
    """Returns the key after the last one that each query may attend to, [B, T] int32; 0 for padding."""
    ends = jnp.broadcast_to(query_positions(record) + 1, record.query.shape[:2])
    if record.q_segment_ids is not None:
        ends = jnp.where(record.q_segment_ids >= 0, ends, 0)
    return jnp.clip(ends, 0, num_keys(record))


def _readable(blocks: jax.Array, end_keys: jax.Array, record: SelectedAttention) -> jax.Array:
    """Returns the blocks that begin before a query's end of keys, -1 instead of others."""
    end_blocks = cdiv(end_keys, record.block_size)[:, :, None, None]
    return jnp.where((blocks >= 0) & (blocks < end_blocks), blocks, -1)


def scalar_tables(record: SelectedAttention, lists: BlockLists, spec: SelectedDecodeSpec) -> dict[str, jax.Array]:
    """Returns the tables in scalar memory: lists with whole steps, ranges of keys, and pages, -1 for no page.

    Steps without blocks follow the last one, so that every step can start copies of a later one.
    """
    length, extra = spec.steps_per_list * spec.blocks_per_step, NUM_BUFFERS - 1
    blocks = jnp.pad(lists.blocks, (*((0, 0),) * 3, (0, length - lists.blocks.shape[3])), constant_values=-1)
    blocks = jnp.pad(blocks.reshape(-1), (0, extra * spec.lists_per_step * length), constant_values=-1)
    tables = {"blocks": blocks, "end_keys": jnp.pad(lists.end_keys.reshape(-1), (0, extra))}
    if lists.first_keys is not None:
        tables["first_keys"] = jnp.pad(lists.first_keys.reshape(-1), (0, extra))
    if record.block_tables is not None:
        pages = clamp_to_int32(record.block_tables)
        pages = jnp.where(has_page(pages, record.key.shape[0]), pages, -1)
        tables["page_table"] = jnp.pad(pages, ((0, extra), (0, 0)), constant_values=-1).reshape(-1)
    return tables


def rows_of_heads(record: SelectedAttention, spec: SelectedDecodeSpec) -> jax.Array:
    """Returns the queries with query heads padded to whole registers, [B T, Hk, rows, D]."""
    query = record.query.reshape(-1, spec.kv_heads, spec.group_size, record.query.shape[3])
    return jnp.pad(query, ((0, 0), (0, 0), (0, spec.rows - spec.group_size), (0, 0)))


def copied_tokens(x: jax.Array, spec: SelectedDecodeSpec) -> jax.Array:
    """Returns keys or values as they are stored, in the groups of tokens that are copied.

    Returns:
        [copies, tokens, word rows, elements per word, D]; with a single head, whose tokens share words, [copies,
        tokens / elements per word, 1, elements per word, D].
    """
    shape = (-1, spec.tokens_per_copy // spec.tokens_per_word, spec.word_rows_per_token, spec.elements_per_word)
    return x.reshape(*shape, x.shape[3])
