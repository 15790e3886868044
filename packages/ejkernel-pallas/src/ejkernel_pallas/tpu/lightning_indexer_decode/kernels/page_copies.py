"""Copies of pages to one of two buffers: those of the next step are started before this step's keys are scored."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop


def load_pages(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> Any:
    """Starts the copies of the next step's pages, waits for those of this step, and returns the buffer of its keys.

    Slots of pages that are not copied hold what was there before; `score_tile` masks them.
    """

    @pl.when(step == 0)
    def _() -> None:
        _start_copies(refs, spec, step)

    @pl.when(step + 1 < pl.num_programs(0))
    def _() -> None:
        _start_copies(refs, spec, step + 1)

    slot = step & 1
    buffer, arrived = refs.key_buffer.at[slot], refs.pages_arrived.at[slot]
    is_full = refs.num_copied_pages[slot] == spec.pages_per_tile

    # These copies are never started; they only give the number of bytes to wait for.
    @pl.when(is_full)
    def _() -> None:
        pltpu.make_async_copy(buffer, buffer, arrived).wait()

    @pl.when(jnp.logical_not(is_full))
    def _() -> None:
        page = buffer.at[pl.ds(0, spec.slots_per_page)]
        wait = lambda n, carry: pltpu.make_async_copy(page, page, arrived).wait()  # noqa: E731
        fori_loop(0, refs.num_copied_pages[slot], wait, None)

    return buffer


def page_of_tile(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any, page: Any) -> Any:
    """Returns a page of a step's tile, -1 for one that is not copied."""
    tile = refs.step_rows[step] * spec.num_key_tiles + refs.step_tiles[step]
    return refs.page_table[tile * spec.pages_per_tile + page]


def _start_copies(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> None:
    """Starts the copies of a step's pages, and counts them."""
    slot, slots = step & 1, spec.slots_per_page

    def start_copy(page: Any, count: Any) -> Any:
        index = page_of_tile(refs, spec, step, page)

        @pl.when(index >= 0)
        def _() -> None:
            target = refs.key_buffer.at[slot, pl.ds(pl.multiple_of(page * slots, slots), slots)]
            pltpu.make_async_copy(refs.key.at[index], target, refs.pages_arrived.at[slot]).start()

        return count + jnp.where(index >= 0, 1, 0)

    refs.num_copied_pages[slot] = fori_loop(0, spec.pages_per_tile, start_copy, jnp.int32(0))
