"""A common prefix read once for the whole batch: two calls of the kernels, merged by their log-sum-exps.

    prefix   0 ........... S        all query rows of the batch as those of one sequence: tiles of many rows
    suffix                 S ... n  each sequence's rows against the keys behind the prefix: tiles of few rows

Source: Ye et al. 2025, arXiv:2501.01005 (FlashInfer: composable formats for shared prefixes).
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import current_device
from ejkernel.planning.softmax_merge import Partial, merge
from ejkernel_triton.chips import chip_of
from ejkernel_triton.paged_attention.config import SCORE_ROWS, PagedForward
from ejkernel_triton.paged_attention.groups import group_of
from ejkernel_triton.paged_attention.shared_memory import fitted
from ejkernel_triton.sizes import padded


def split(record: PagedAttention) -> tuple[PagedAttention, PagedAttention]:
    """The record of the prefix and that of the keys behind it."""
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
        qq_bias=None,  # and pairs of queries are behind the prefix
        causal=False,
        shared_prefix=None,
    )
    suffix = dataclasses.replace(record, kv_starts=jnp.full(sequences, record.shared_prefix), shared_prefix=None)
    return prefix, suffix


def many_rows(record: PagedAttention, config: PagedForward) -> PagedForward:
    """The configuration with tiles of as many query rows as a tile of scores, and shared memory, have room for."""
    chip = chip_of(current_device())
    most = max(1, SCORE_ROWS // group_of(record, chip))
    rows = max(config.block_q, min(padded(record.query.shape[0]), 1 << (most.bit_length() - 1)))
    return fitted(record, dataclasses.replace(config, block_q=rows), chip)


def merged(prefix: tuple[jax.Array, jax.Array], suffix: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, Dv] and lse [T, H] over the keys of both."""
    parts = [Partial(output.astype(jnp.float32)[None], lse.T[None]) for output, lse in (prefix, suffix)]
    output, lse = merge(*parts)
    return output[0].astype(suffix[0].dtype), lse[0].T
