"""A bitonic sort of the selected keys of each query: the largest score first, of equal scores the lower key.

A lane is a query, and position p of the order is in register p mod R of the R = K / 8 registers of a lane, in sublane
p div R. Small distances, which most steps have, are then between registers; only the three largest distances are
between sublanes of a register.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.lightning_indexer.kernels.refs import IndexerRefs
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES

SUBLANE_BITS = SUBLANES.bit_length() - 1
BLOCK_BITS = LANES.bit_length() - 1 - SUBLANE_BITS
"""The power of two that the registers of a block are."""


class Rows(NamedTuple):
    """Ordered scores and packed indices of some rows."""

    ordered_scores: jax.Array
    packed_indices: jax.Array

    def reshape(self, shape: tuple[int, ...]) -> "Rows":
        """Returns the rows in another shape."""
        return Rows(self.ordered_scores.reshape(shape), self.packed_indices.reshape(shape))


def register_bits(spec: IndexerSpec) -> int:
    """Returns the power of two that the registers of a lane are."""
    return spec.kept_rows.bit_length() - 1 - SUBLANE_BITS


def sort_rows(refs: IndexerRefs, spec: IndexerSpec) -> None:
    """Sorts the first `kept_rows` rows into the order of positions."""
    bits = register_bits(spec)

    def sort_block(block: Any, carry: None) -> None:
        rows = _load(refs, block)
        for run in range(1, BLOCK_BITS + 1):
            rows = _exchange_registers(rows, run, _is_ascending(spec, block, run))
        _store(refs, block, rows)

    fori_loop(0, spec.kept_rows // LANES, sort_block, None)
    fori_loop(BLOCK_BITS + 1, bits + 1, lambda run, carry: _merge_runs(refs, spec, run), None)
    for run in range(bits + 1, bits + SUBLANE_BITS + 1):
        _merge_runs(refs, spec, run)


def load_positions(ref: Any, spec: IndexerSpec, block: Any) -> jax.Array:
    """Returns 128 successive positions of the order."""
    bits, position = register_bits(spec), block * LANES
    size = min(LANES, 1 << bits)

    def load(first: Any) -> jax.Array:
        register, sublane = first & ((1 << bits) - 1), lax.shift_right_logical(first, jnp.int32(bits))
        return ref[pl.ds(register * SUBLANES + sublane, size, stride=SUBLANES), :]

    return jnp.concatenate([load(position + n) for n in range(0, LANES, size)])


def _is_ascending(spec: IndexerSpec, block: Any, run: Any) -> jax.Array:
    """Returns 1 where a run of 2^run positions, of which a row is, is sorted with the smallest first; else 0."""
    row, registers = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0), LANES // SUBLANES
    register = block * registers + lax.shift_right_logical(row, jnp.int32(SUBLANE_BITS))
    position = lax.shift_left(row & (SUBLANES - 1), jnp.int32(register_bits(spec))) + register
    return lax.shift_right_logical(position, jnp.int32(run)) & 1


def _load(refs: IndexerRefs, block: Any) -> Rows:
    rows = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)
    return Rows(refs.ordered_scores[rows, :], refs.packed_indices[rows, :])


def _store(refs: IndexerRefs, block: Any, rows: Rows) -> None:
    place = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)
    refs.ordered_scores[place, :], refs.packed_indices[place, :] = rows.ordered_scores, rows.packed_indices


def _comes_first(a: Rows, b: Rows) -> jax.Array:
    """Returns whether a row of `a` is selected before the one of `b`. Packed indices are in the order of keys."""
    is_tie = a.ordered_scores == b.ordered_scores
    return (a.ordered_scores > b.ordered_scores) | (is_tie & (a.packed_indices < b.packed_indices))


def _choose(condition: jax.Array, a: Rows, b: Rows) -> Rows:
    return Rows(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _merge_runs(refs: IndexerRefs, spec: IndexerSpec, run: Any) -> None:
    """Sorts bitonic runs of 2^run positions: exchanges at half a run's distance, at a quarter, and so on."""
    num_blocks, bits = spec.kept_rows // LANES, register_bits(spec)
    if isinstance(run, int):
        fori_loop(0, num_blocks, lambda block, carry: _exchange_sublanes(refs, spec, block, run), None)
        run_of_registers = jnp.int32(bits)
    else:
        run_of_registers = run

    def exchange_at_distance(step: Any, carry: None) -> None:
        shift = run_of_registers - BLOCK_BITS - 1 - step

        def exchange(n: Any, carry: None) -> None:
            # The blocks whose numbers have a bit of 0 for the distance.
            low = n & (lax.shift_left(jnp.int32(1), shift) - 1)
            first = lax.shift_left(n - low, jnp.int32(1)) + low
            second = first + lax.shift_left(jnp.int32(1), shift)
            a, b = _load(refs, first), _load(refs, second)
            keep = _comes_first(a, b) != (_is_ascending(spec, first, run) != 0)
            _store(refs, first, _choose(keep, a, b))
            _store(refs, second, _choose(keep, b, a))

        fori_loop(0, num_blocks // 2, exchange, None)

    def merge_block(block: Any, carry: None) -> None:
        ascending = _is_ascending(spec, block, run)
        _store(refs, block, _exchange_registers(_load(refs, block), BLOCK_BITS, ascending))

    fori_loop(0, run_of_registers - BLOCK_BITS, exchange_at_distance, None)
    fori_loop(0, num_blocks, merge_block, None)


def _exchange_registers(rows: Rows, run: int, ascending: jax.Array) -> Rows:
    """Returns a block after the exchanges of all distances below 2^run registers."""
    for bit in reversed(range(run)):
        pairs = rows.reshape((-1, 2, SUBLANES << bit, LANES))
        first, second = (Rows(*(x[:, n] for x in pairs)) for n in (0, 1))
        keep = _comes_first(first, second) != (ascending.reshape(pairs[0].shape)[:, 0] != 0)
        exchanged = zip(_choose(keep, first, second), _choose(keep, second, first), strict=True)
        rows = Rows(*(jnp.stack(pair, axis=1).reshape(LANES, LANES) for pair in exchanged))
    return rows


def _exchange_sublanes(refs: IndexerRefs, spec: IndexerSpec, block: Any, run: int) -> None:
    """Exchanges rows of a block at all distances of whole sublanes below 2^run positions."""
    shape = (LANES // SUBLANES, SUBLANES, LANES)
    rows = _load(refs, block).reshape(shape)
    ascending = _is_ascending(spec, block, run).reshape(shape)
    sublane = lax.broadcasted_iota(jnp.int32, shape, 1)
    for bit in reversed(range(run - register_bits(spec))):
        distance = 1 << bit
        is_second = lax.shift_right_logical(sublane, jnp.int32(bit)) & 1
        below, above = (Rows(*(pltpu.roll(x, n, 1) for x in rows)) for n in (distance, SUBLANES - distance))
        partner = _choose(is_second != 0, below, above)
        # The first of two rows keeps what comes first, unless the run is ascending.
        keep = _comes_first(rows, partner) == (is_second == ascending)
        rows = _choose(keep, rows, partner)
    _store(refs, block, rows.reshape((LANES, LANES)))
