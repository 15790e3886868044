"""The work list of a call and the programs' shares of it; and the split of a batch with a common prefix.

The keys of a common prefix are read once for the whole batch, by two calls of the kernels, merged by log-sum-exp:

    prefix   0 ........... S        all query rows of the batch as those of one sequence: tiles of many rows
    suffix                 S ... n  each sequence's rows against the keys after the prefix: tiles of few rows

Source: Ye et al. 2025, arXiv:2501.01005 (FlashInfer: composable formats for shared prefixes).
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import Rotary
from ejkernel.families.paged_attention.work import Deal, Work, deal, find_work
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.paged_attention.config import SCORE_ROWS, PagedForward, fitted, group_of
from ejkernel_triton.paged_attention.spec import PagedSpec, make_spec
from ejkernel_triton.sizes import padded, padded_for_dot

FIELDS = 9
"""Fields of an entry of the work list; `tile` names them."""

MAX_PLANNED = 8192
"""The largest number of entries or sequences that one program can plan; XLA plans more."""


def spec_of_work(record: PagedAttention, config: PagedForward, rotary: Rotary | None) -> PagedSpec:
    """Returns the constants of a record's kernels, with room for the longest work list."""
    sequences = record.kv_lens.shape[0]
    # An upper bound on the entries: each sequence may have one partial tile.
    tiles = record.query.shape[0] // config.block_q + sequences
    return make_spec(record, config, sequences if record.query_start is None else tiles, rotary)


def plan_work(record: PagedAttention, spec: PagedSpec, config: PagedForward) -> tuple[jax.Array, jax.Array]:
    """Returns the work list in the kernels' layout, [W, fields], and the programs' starts, [P + 1, 2]; see
    `work_list_kernel`.
    """
    if max(spec.ENTRIES, spec.SEQUENCES) > MAX_PLANNED:
        work = find_work(record, config.block_q)
        schedule = deal(work, config.block_kv, spec.HK, config.num_programs)
        return _entries(work, schedule), _shares(schedule)
    from ejkernel_triton.paged_attention.kernels.work_list import work_list_kernel

    given = (record.kv_lens, record.query_start, record.kv_starts, paged_cache.live_sequences(record))
    ints = [None if x is None else x.astype(jnp.int32).reshape(1, -1) for x in given]
    shapes = (Shape((1, spec.ENTRIES, FIELDS), jnp.int32), Shape((1, spec.PROGRAMS + 1, 2), jnp.int32))
    blocks = {"SEQUENCE_BLOCK": spec.SEQUENCES, "ENTRY_BLOCK": spec.ENTRIES, "PROGRAM_BLOCK": spec.PROGRAMS}
    constants = {name: padded_for_dot(size) for name, size in blocks.items()}
    work, shares = launch(
        work_list_kernel,
        ints,
        shapes,
        batch=1,
        grid=1,
        num_warps=4 if max(constants.values()) <= 1024 else 16,
        num_stages=1,
        constants={"spec": spec, **constants},
    )
    return work[0], shares[0]


def _entries(work: Work, schedule: Deal) -> jax.Array:
    """Returns the work list, computed by XLA."""
    fields = (work.sequence, work.row, work.rows, work.position, work.context, work.low, work.high)
    return jnp.stack((*fields, schedule.start, schedule.tiles), axis=1)


def _shares(schedule: Deal) -> jax.Array:
    """Returns the programs' starts and, last, the tiles per share and in total."""
    rows = jnp.stack((schedule.entry, schedule.begin), axis=1)
    return jnp.concatenate((rows, jnp.stack((schedule.share, schedule.total))[None]))


def split_prefix(record: PagedAttention) -> tuple[PagedAttention, PagedAttention]:
    """Returns the record of the prefix and that of the keys after it."""
    assert record.shared_prefix is not None
    assert record.block_tables is not None
    assert record.query_start is not None
    sequences = record.kv_lens.shape[0]
    live = sequences if record.num_seqs is None else paged_cache.live_sequences(record)
    prefix = dataclasses.replace(
        record,
        block_tables=record.block_tables[:1],
        kv_lens=record.shared_prefix[None],
        query_start=jnp.stack((record.query_start[0], record.query_start[live])),
        num_seqs=None,
        softmax_aux=None,  # a sink joins the denominator once
        qq_bias=None,  # pairs of queries are after the prefix
        causal=False,
        shared_prefix=None,
    )
    suffix = dataclasses.replace(record, kv_starts=jnp.full(sequences, record.shared_prefix), shared_prefix=None)
    return prefix, suffix


def prefix_config(record: PagedAttention, config: PagedForward) -> PagedForward:
    """Returns the configuration with as many query rows per tile as a tile of scores, and shared memory, allow."""
    chip = gpu_of(current_device())
    most = max(1, SCORE_ROWS // group_of(record, chip))
    rows = max(config.block_q, min(padded(record.query.shape[0]), 1 << (most.bit_length() - 1)))
    return fitted(record, dataclasses.replace(config, block_q=rows), chip)
