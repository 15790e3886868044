"""Copies of pages to one of two buffers: those of the next step are started while this step's keys are scored."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop


def wait_for_pages(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> Any:
    """Waits for a step's pages, and returns the buffer of its keys; the first step starts its own copies.

    Slots of pages that are not copied hold what was there before; `score_tile` masks them.
    """

    @pl.when(step == 0)
    def _() -> None:
        def start_copy(page: Any, carry: None) -> None:
            index = page_of_tile(refs, spec, step, page)
            pl.when(index >= 0)(lambda: _start_copy(refs, spec, index, 0, page))

        fori_loop(0, spec.pages_per_tile, start_copy, None)

    slot = step & 1
    buffer, arrived = refs.key_buffer.at[slot], refs.pages_arrived.at[slot]
    count = num_copied_pages(refs, spec, step)

    # These copies are never started; they only give the number of bytes to wait for.
    @pl.when(count == spec.pages_per_tile)
    def _() -> None:
        pltpu.make_async_copy(buffer, buffer, arrived).wait()

    @pl.when(count < spec.pages_per_tile)
    def _() -> None:
        page = buffer.at[pl.ds(0, spec.slots_per_page)]
        wait = lambda n, carry: pltpu.make_async_copy(page, page, arrived).wait()  # noqa: E731
        fori_loop(0, count, wait, None)

    return buffer


def start_next_copies(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any, chunk: Any, num_chunks: int) -> None:
    """Starts one of `num_chunks` equal shares of the next step's copies.

    Each copy is predicated, not branched around, so the compiler can schedule it next to the products of this step.
    """
    # Under `jax.vmap`, `pl.num_programs` may count the calls.
    count, next_step = cdiv(spec.pages_per_tile, num_chunks), jnp.minimum(step + 1, refs.num_steps[0] - 1)
    first, entry, slot = chunk * count, _first_table_entry(refs, spec, next_step), (step + 1) & 1
    end = jnp.where(next_step > step, spec.pages_per_tile, 0)
    for page in range(count):
        index = refs.page_table[entry + jnp.minimum(first + page, spec.pages_per_tile - 1)]
        exists = (index >= 0) & (first + page < end)
        pl.when(exists)(functools.partial(_start_copy, refs, spec, index, slot, first + page))


def page_of_tile(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any, page: Any) -> Any:
    """Returns a page of a step's tile, -1 for one that is not copied."""
    return refs.page_table[_first_table_entry(refs, spec, step) + page]


def num_copied_pages(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> Any:
    """Returns how many pages of a step's tile are copied."""
    return refs.num_copied_pages[_tile(refs, spec, step)]


def _tile(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> Any:
    return refs.step_rows[step] * spec.num_key_tiles + refs.step_tiles[step]


def _first_table_entry(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> Any:
    return _tile(refs, spec, step) * spec.pages_per_tile


def _start_copy(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, index: Any, slot: Any, page: Any) -> None:
    """Starts the copy of a page to its slots in a buffer."""
    first_slot = pl.multiple_of(page * spec.slots_per_page, spec.slots_per_page)
    target = refs.key_buffer.at[slot, pl.ds(first_slot, spec.slots_per_page)]
    pltpu.make_async_copy(refs.key.at[index], target, refs.pages_arrived.at[slot]).start()
