"""The forward kernel: logits of a block of tokens, a tile of the vocabulary at a time, and their statistics.

HBM   head     ── double buffer ──►  block v                [D, block_v]
VMEM  states                         block t, once          [block_t, D]
MXU                                  states x block v
VPU                                  largest, sum of exponentials, expected logit, per lane
HBM   statistics ◄────────────────── after the last block v
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.cross_entropy.kernels.tile import LossRefs, capped_logits
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec
from ejkernel_pallas.tpu.mosaic.vectors import LANES

LSE, LARGEST, ENTRY, EXPECTED = range(4)
"""Columns of the statistics."""


def linear_statistics(refs: LossRefs, *, spec: LossSpec) -> None:
    """Adds a tile of logits to the statistics of its tokens, and stores these after the last tile."""
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _() -> None:
        refs.largest[...] = jnp.full_like(refs.largest, -jnp.inf)
        refs.entry[...] = jnp.zeros_like(refs.entry)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.expected[...] = jnp.zeros_like(refs.expected)

    _add_tile(refs, block, spec)

    @pl.when(block == spec.num_entry_blocks - 1)
    def _() -> None:
        _store_statistics(refs, spec)


def _add_tile(refs: LossRefs, block: Any, spec: LossSpec) -> None:
    """Adds a tile, 128 entries at a time: each lane has statistics of its own, and nothing moves between lanes."""
    values = capped_logits(refs, spec)
    lanes = lax.broadcasted_iota(jnp.int32, (spec.block_t, LANES), 1)
    groups = []
    targets, expected = refs.targets[...], refs.expected[...]
    largest, entry = refs.largest[...], refs.entry[...]
    new_largest = largest
    for start in range(0, spec.block_v, LANES):
        entries = block * spec.block_v + start + lanes
        group = values[:, start : start + LANES]
        weights = jnp.where(entries == targets, spec.target_part, 0.0) + spec.even_part
        terms = jnp.where(weights != 0, weights * group, 0)
        if spec.num_entries % spec.block_v:
            exists = entries < spec.num_entries
            group, terms = jnp.where(exists, group, -jnp.inf), jnp.where(exists, terms, 0)
        expected = expected + terms
        entry = jnp.where(group > new_largest, entries, entry)
        new_largest = jnp.maximum(new_largest, group)
        groups.append(group)
    relative = jnp.where(new_largest == -jnp.inf, 0, new_largest)
    total = refs.total[...] * jnp.exp(largest - relative)
    for group in groups:
        total = total + jnp.exp(group - relative)
    refs.largest[...], refs.entry[...] = new_largest, entry
    refs.total[...], refs.expected[...] = total, expected


def _store_statistics(refs: LossRefs, spec: LossSpec) -> None:
    """Combines the statistics of lanes."""
    largest = jnp.max(refs.largest[...], axis=1, keepdims=True)
    relative = jnp.where(largest == -jnp.inf, 0, largest)
    total = jnp.sum(refs.total[...] * jnp.exp(refs.largest[...] - relative), axis=1, keepdims=True)
    candidates = jnp.where(refs.largest[...] == largest, refs.entry[...], spec.num_entries).astype(jnp.float32)
    numbers = {
        LSE: jnp.log(total) + relative,
        LARGEST: largest,
        ENTRY: jnp.min(candidates, axis=1, keepdims=True),
        EXPECTED: jnp.sum(refs.expected[...], axis=1, keepdims=True),
    }
    columns = lax.broadcasted_iota(jnp.int32, (spec.block_t, LANES), 1)
    result = jnp.zeros((spec.block_t, LANES), jnp.float32)
    for column, values in numbers.items():
        result = jnp.where(columns == column, values, result)
    refs.statistics[...] = result
