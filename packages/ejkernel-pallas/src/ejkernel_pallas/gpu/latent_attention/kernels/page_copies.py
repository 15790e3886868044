"""The addresses of a block's keys in a paged cache, for the producers of the latent and of the paged kernel."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.kernels.call import ScheduledCall, WorkItem
from ejkernel_pallas.gpu.latent_attention.spec import SWIZZLE_ATOM_ROWS

PageAndSlotPerCopy = list[tuple[Any, Any]]
"""Page and slot of every copy of a block."""


def find_page_and_slot_per_copy(
    call: ScheduledCall, item: WorkItem, first_key: Any, num_keys: int
) -> tuple[PageAndSlotPerCopy, Any]:
    """Returns page and slot of every copy of a block of keys, and which groups of eight keys exist.

    A missing one gets the number of pages as its page: TMA writes zeros for addresses past an array's end.

    Args:
        call: The launch; `operands["tables"]` has the page table of every sequence.
        item: The item whose keys they are.
        first_key: The block's first key.
        num_keys: Keys per block.
    """
    spec = call.spec
    if spec.pages_per_table_row == 0:
        # All bits set: keys past the sequence's end are masked by its length.
        return [(item.sequence, first_key)], I32(-1)
    tables, num_pages, valid_group_bits = call.operands["tables"], I32(spec.num_pages), I32(0)
    page_slots: PageAndSlotPerCopy = []
    groups_per_copy = spec.slots_per_copy // SWIZZLE_ATOM_ROWS
    for first in range(0, num_keys, spec.slots_per_copy):
        column = lax.div(first_key + first, I32(spec.page_size))
        # Past the table's end its last entry is read; `page_exists` is false for it.
        page = tables[item.sequence, jnp.minimum(column, spec.pages_per_table_row - 1)]
        page_exists = (first_key + first < item.key_end) & (page >= 0) & (page < num_pages)
        page_slots.append((jnp.where(page_exists, page, num_pages), lax.rem(first_key + first, I32(spec.page_size))))
        # One bit per eight keys: missing keys are masked, as zeros would still count in the softmax.
        valid_group_bits = valid_group_bits | jnp.where(
            page_exists, I32(((1 << groups_per_copy) - 1) << (first // SWIZZLE_ATOM_ROWS)), I32(0)
        )
    return page_slots, valid_group_bits
