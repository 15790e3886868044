"""The choice between reading the keys of listed tokens and reading every block once."""

from typing import Any

from ejkernel.families.selected_attention import SelectedAttention, blocks_per_query, num_listable_blocks

MAX_SLOTS = 2**31 - 1
"""Largest number of keys of all rows that int32 can index."""


def reads_token_lists(record: SelectedAttention) -> bool:
    """Returns whether a call copies only the keys that its queries list.

    The loop over blocks copies all keys. A call with few queries, such as a decode step, lists fewer blocks than there
    are. Pages are always read in this way.
    """
    if record.block_tables is not None:
        return True
    sizes: tuple[Any, ...] = (*record.key.shape[:2], record.query.shape[1], num_listable_blocks(record))
    if not all(isinstance(size, int) for size in sizes):  # symbolic sizes cannot be compared
        return False
    rows, keys, queries, blocks = sizes
    return rows * keys <= MAX_SLOTS and queries * blocks_per_query(record) < blocks
