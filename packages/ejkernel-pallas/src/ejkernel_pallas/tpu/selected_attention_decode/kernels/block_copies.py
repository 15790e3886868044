"""Copies of listed blocks to one of three buffers: those of a later step are started while this step is computed.

A copy has the consecutive tokens of a block that a page has too, of the word row of one KV head or of all of them:

    HBM   [copies, tokens, word rows, elements per word, D]      a word row: 1 head of 32 bits, or 2 heads of 16 bits
    VMEM  [buffer, list, copy, tokens, 1 or all word rows, elements per word, D]

What is decided when a copy is started is kept in scalar memory for the step that reads it.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.selected_attention_decode.config import NUM_BUFFERS
from ejkernel_pallas.tpu.selected_attention_decode.kernels.refs import SelectedDecodeRefs
from ejkernel_pallas.tpu.selected_attention_decode.spec import SelectedDecodeSpec

STARTED, PARTIAL = 0, 1
"""Where `counts` has the copies that are started, and those with a token that the query does not attend to."""


def buffer_of_step(step: Any) -> Any:
    """Returns the buffer that has the keys and values of a step."""
    return step - divide(step, NUM_BUFFERS) * NUM_BUFFERS


def chunk_of_step(spec: SelectedDecodeSpec, step: Any) -> Any:
    """Returns the index of a step among those of its lists."""
    return step - divide(step, spec.steps_per_list) * spec.steps_per_list if spec.steps_per_list > 1 else 0


def query_of_step(spec: SelectedDecodeSpec, step: Any) -> Any:
    """Returns the query of a step, among those of all batch rows."""
    return divide(step, spec.steps_per_query)


def start_copies(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, step: Any, indices: range) -> None:
    """Starts some of the copies of a step. After the last step, tables have steps without keys.

    Each copy is predicated, not branched around, so the compiler can schedule it next to the products of another step.
    """
    slot, query = buffer_of_step(step), query_of_step(spec, step)
    end_key, first_key = refs.end_keys[query], refs.first_keys[query] if spec.has_first_keys else 0
    started, partial = (refs.counts[slot, n] if indices.start else jnp.int32(0) for n in (STARTED, PARTIAL))
    for index in indices:
        block, start = _block_and_token_of_copy(refs, spec, step, index)
        valid_first = jnp.clip(first_key - start, 0, spec.tokens_per_copy) if spec.has_first_keys else jnp.int32(0)
        valid_end = jnp.clip(end_key - start, 0, spec.tokens_per_copy)
        page, slot_in_page = _page_of_token(refs, spec, divide(query, spec.num_queries), start)
        is_copied = (block >= 0) & (valid_end > valid_first) & (page >= 0)
        valid_end = jnp.where(is_copied, valid_end, 0)
        refs.valid_firsts[slot, index], refs.valid_ends[slot, index] = valid_first, valid_end
        refs.partial_copies[slot, partial] = jnp.int32(index)
        is_whole = valid_end - valid_first == spec.tokens_per_copy
        started += is_copied.astype(jnp.int32)
        partial += jnp.logical_not(is_whole).astype(jnp.int32)
        source = page * (spec.slots_per_page // spec.tokens_per_copy) + divide(slot_in_page, spec.tokens_per_copy)
        pl.when(is_copied)(functools.partial(_start_copy, refs, spec, source, step, index))
    refs.counts[slot, STARTED], refs.counts[slot, PARTIAL] = started, partial


def wait_for_copies(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, step: Any) -> None:
    """Waits for the copies of a step.

    What is not copied holds what was there before. `attend_blocks` masks scores of it, and zeroes values.
    """
    slot = buffer_of_step(step)
    started = refs.counts[slot, STARTED]
    arrived, buffers = refs.arrived.at[slot], (refs.key_buffer.at[slot], refs.value_buffer.at[slot])

    # These copies are never started; they only give the number of bytes to wait for.
    @pl.when(started == spec.copies_per_step)
    def _() -> None:
        for buffer in buffers:
            pltpu.make_async_copy(buffer, buffer, arrived).wait()

    @pl.when(started < spec.copies_per_step)
    def _() -> None:
        def wait(n: Any, carry: None) -> None:
            for buffer in buffers:
                pltpu.make_async_copy(buffer.at[0, 0], buffer.at[0, 0], arrived).wait()

        fori_loop(0, started, wait, None)


def _list_of_step(spec: SelectedDecodeSpec, step: Any, at: int) -> Any:
    """Returns one of the lists of a step, among those of all queries."""
    return divide(step, spec.steps_per_list) * spec.lists_per_step + at


def _block_and_token_of_copy(
    refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, step: Any, index: int
) -> tuple[Any, Any]:
    """Returns the block of a copy, -1 for none, and the first token of the copy, or any."""
    at, copy = divmod(index, spec.copies_per_list)
    first = (_list_of_step(spec, step, at) * spec.steps_per_list + chunk_of_step(spec, step)) * spec.blocks_per_step
    block = refs.blocks[first + copy // spec.copies_per_block]
    return block, jnp.maximum(block, 0) * spec.block_size + copy % spec.copies_per_block * spec.tokens_per_copy


def _page_of_token(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, row: Any, token: Any) -> tuple[Any, Any]:
    """Returns the page of a token of a batch row, -1 for none, and the token's slot there."""
    if not spec.table_entries:
        return row, token
    entry = divide(token, spec.slots_per_page)
    page = refs.page_table[row * spec.table_entries + jnp.minimum(entry, spec.table_entries - 1)]
    return page, token - entry * spec.slots_per_page


def _start_copy(refs: SelectedDecodeRefs, spec: SelectedDecodeSpec, source: Any, step: Any, index: int) -> None:
    """Starts the copy of keys, and that of values."""
    at, copy = divmod(index, spec.copies_per_list)
    slot = buffer_of_step(step)
    for tokens, buffer in ((refs.keys, refs.key_buffer), (refs.values, refs.value_buffer)):
        rows = tokens.at[source]
        if spec.word_rows_per_copy < spec.word_rows_per_token:
            rows = rows.at[:, pl.ds(divide(kv_head_of_list(spec, step, at), spec.heads_per_word), 1)]
        pltpu.make_async_copy(rows, buffer.at[slot, at, copy], refs.arrived.at[slot]).start()


def kv_head_of_list(spec: SelectedDecodeSpec, step: Any, at: int) -> Any:
    """Returns the KV head of a list of a step."""
    lists = spec.kv_heads // spec.lists_per_step
    list_group = divide(step, spec.steps_per_list)
    return (list_group - divide(list_group, lists) * lists) * spec.lists_per_step + at
