"""Forward pass of paged attention in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import Rotary, rotary_of
from ejkernel.families.paged_attention.work import Deal, Work, deal, find_work
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.paged_attention import cascade
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.paged_attention.spec import PagedSpec, make_spec, padded
from ejkernel_triton.paged_attention.write import write

FIELDS = 9
"""Fields of an entry of the work list; `paged_tile` names them."""

MAX_PLANNED = 8192
"""Entries or sequences that one program can plan; XLA plans more."""

MERGED_NUMBERS = 2048
"""Numbers that a program of one warp merges at once: slots of a row times their values."""


def forward(record: PagedAttention, config: PagedForward) -> tuple[tuple[jax.Array, ...], None]:
    """Attention output of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes, programs, warps and stages.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] float32 and the pages that were written, if any; no
        residuals.
    """
    if record.shared_prefix is not None:
        prefix, suffix = cascade.split(record)
        parts = (attend_pages(prefix, cascade.many_rows(prefix, config), None), attend_pages(suffix, config, None))
        return cascade.merged(*parts), None
    rotary = rotary_of(record)
    spec = _spec(record, config, rotary)
    plan = _plan(record, spec, config)
    record, pages = write(record, plan[0], config.block_q)
    output, lse = _zero_outside_sequences(record, *_attend(record, rotary_of(record), spec, plan, config))
    return (output, lse, *pages), None


def attend_pages(record: PagedAttention, config: PagedForward, rotary: Rotary | None) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a record whose tokens are all in their pages.

    Args:
        record: The record.
        config: Tile sizes, programs, warps and stages.
        rotary: Rotary columns of a latent record.
    """
    spec = _spec(record, config, rotary)
    return _zero_outside_sequences(record, *_attend(record, rotary, spec, _plan(record, spec, config), config))


def _spec(record: PagedAttention, config: PagedForward, rotary: Rotary | None) -> PagedSpec:
    sequences = record.kv_lens.shape[0]
    # The most entries that these rows can make: each sequence may have one tile that is not full.
    tiles = record.query.shape[0] // config.block_q + sequences
    return make_spec(record, config, sequences if record.query_start is None else tiles, rotary)


def _zero_outside_sequences(record: PagedAttention, output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and lse with 0 and -inf in rows of no sequence, which are in no entry of the work list."""
    if record.query_start is None:
        return output, lse
    # Rows of sequences follow each other.
    live = record.kv_lens.shape[0] if record.num_seqs is None else paged_cache.live_sequences(record)
    token = jnp.arange(record.query.shape[0], dtype=jnp.int32)
    in_sequence = (token >= record.query_start[0]) & (token < record.query_start[live])
    return jnp.where(in_sequence[:, None, None], output, 0), jnp.where(in_sequence[:, None], lse, -jnp.inf)


def _plan(record: PagedAttention, spec: PagedSpec, config: PagedForward) -> tuple[jax.Array, jax.Array]:
    """The work list as the kernels read it, [W, fields], and where programs begin, [P + 1, 2]; see `plan_kernel`."""
    if max(spec.ENTRIES, spec.SEQUENCES) > MAX_PLANNED:
        work = find_work(record, config.block_q)
        schedule = deal(work, config.block_kv, spec.HK, config.num_programs)
        return _entries(work, schedule), _shares(schedule)
    from ejkernel_triton.paged_attention.plan_kernel import plan_kernel

    given = (record.kv_lens, record.query_start, record.kv_starts, paged_cache.live_sequences(record))
    ints = [None if x is None else x.astype(jnp.int32).reshape(1, -1) for x in given]
    shapes = (Shape((1, spec.ENTRIES, FIELDS), jnp.int32), Shape((1, spec.PROGRAMS + 1, 2), jnp.int32))
    blocks = {"SEQUENCE_BLOCK": spec.SEQUENCES, "ENTRY_BLOCK": spec.ENTRIES, "PROGRAM_BLOCK": spec.PROGRAMS}
    constants = {name: padded(size) for name, size in blocks.items()}
    work, shares = launch(
        plan_kernel,
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
    """The work list, computed by XLA."""
    fields = (work.sequence, work.row, work.rows, work.position, work.context, work.low, work.high)
    return jnp.stack((*fields, schedule.start, schedule.tiles), axis=1)


def _shares(schedule: Deal) -> jax.Array:
    """Where programs begin and, last, the size of a share and of all."""
    rows = jnp.stack((schedule.entry, schedule.begin), axis=1)
    return jnp.concatenate((rows, jnp.stack((schedule.share, schedule.total))[None]))


def _attend(
    record: PagedAttention,
    rotary: Rotary | None,
    spec: PagedSpec,
    plan: tuple[jax.Array, jax.Array],
    config: PagedForward,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of the rows that are in the work list."""
    from ejkernel_triton.paged_attention.combine_kernel import combine_kernel
    from ejkernel_triton.paged_attention.paged_kernel import paged_kernel

    # The first axis is rows of the batch, of which `jax.vmap` makes more.
    row = jax.tree.map(lambda x: x[None], record)
    tables = None if row.block_tables is None else row.block_tables.astype(jnp.int32)
    sinks, slopes = (None if x is None else x.astype(jnp.float32) for x in (row.softmax_aux, row.alibi_slopes))
    rows, heads, _ = record.query.shape
    values = record.key_pages if record.value_pages is None else record.value_pages
    values = values if rotary is None else rotary.rows
    work, shares = plan
    # Split-KV: two slots a program, whatever the lengths; see `paged_kernel`.
    slots, part = 2 * spec.PROGRAMS * spec.SPLITS, spec.BV + (spec.BR if spec.TAIL else 0)
    shapes: tuple[Shape | int, ...] = (
        Shape((1, rows, heads, spec.DV), record.query.dtype),
        Shape((1, rows, heads), jnp.float32),
        Shape((1, slots, spec.M, part), jnp.float32),
        Shape((1, slots, spec.M), jnp.float32),
        Shape((1, slots, spec.M), jnp.float32),
    )
    output, lse, parts, maxima, sums = launch(
        paged_kernel,
        (row.query, row.key_pages, values[None], tables, work[None], shares[None], sinks, slopes, row.qq_bias),
        shapes,
        batch=1,
        grid=spec.PROGRAMS * spec.SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    # Writes into the memory of output and lse (inputs 6 and 7), and only rows of split items. One warp: a program has
    # one row of a tile of scores.
    output, lse = launch(
        combine_kernel,
        (parts, maxima, sums, work[None], shares[None], sinks, output, lse),
        (6, 7),
        batch=1,
        grid=spec.PROGRAMS * spec.SPLITS * spec.M,
        num_warps=1,
        num_stages=1,
        constants={"spec": spec, "PARTS": max(2, min(16, MERGED_NUMBERS // spec.BV))},
    )
    return output[0], lse[0]
