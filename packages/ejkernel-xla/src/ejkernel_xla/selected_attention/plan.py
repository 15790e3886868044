"""Which calls read the keys of listed tokens, and which read every block once."""

from typing import Any

from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_listable_blocks

MAX_SLOTS = 2**31 - 1
"""Keys of all rows that int32 can number."""


def reads_token_lists(record: SelectedAttention) -> bool:
    """Returns whether a call copies the keys that its queries list, and no others.

    The loop over blocks lays all keys out anew. A call of few queries, such as a decode step, lists fewer blocks than
    there are. Pages are read in this way only.
    """
    if record.block_tables is not None:
        return True
    sizes: tuple[Any, ...] = (*record.key.shape[:2], record.query.shape[1], num_listable_blocks(record))
    if not all(isinstance(size, int) for size in sizes):  # symbolic sizes have no order
        return False
    rows, keys, queries, blocks = sizes
    return rows * keys <= MAX_SLOTS and queries * blocks_per_query(record) < blocks
