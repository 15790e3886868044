"""Weights of the gates within a chunk, for gates of any strength: products and sums, never a division of weights.

A pair of tokens j <= i is weighted by exp(g[j+1] + ... + g[i]). The product exp(b[i]) * exp(-b[j]) of cumulative sums b
would overflow, and their difference would lose the digits of gates that follow a strong one. So

    one gate per head      cumulative sums are stored as two values, one of which is exact: differences lose nothing
    (as one value if operands are bfloat16: an error of at most a thousandth of a weight)
    one gate per channel   the chunk is halved recursively: a pair that a cut at m separates has two factors,
                         exp(g[m+1] + ... + g[i]) of token i, and exp(g[j+1] + ... + g[m]) of token j

No step depends on the values of the gates: freshly initialised and trained layers take the same time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot, indices
from ejkernel_pallas.tpu.mosaic import vectors
from ejkernel_pallas.tpu.mosaic.gradients import with_custom_gradient
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MAX_EXPONENT = 80.0
"""The largest exponent whose exponential is finite even after the multiplications that follow."""
ROWS_PER_REGISTER = 8
"""Rows of a float32 register."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadDecay:
    """Log gates of a chunk that all channels of a key share, summed from the first token on.

    Attributes:
        coarse: [C, 1] multiples of 2 ** -8, exact; the whole sums if `fine` is None.
        coarse_row: [1, C] the same values as a row.
        fine: [C, 1] the remainders.
        fine_row: [1, C] the same values as a row.
    """

    coarse: jax.Array
    coarse_row: jax.Array
    fine: jax.Array | None = None
    fine_row: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class HeadGates:
    """One gate per head and token.

    Attributes:
        pair_decay: [C, C] weights of the gates after token j up to and including token i; 0 for j > i.
        decay_since_start: [C, 128] weights of the gates up to and including each token, the same in every lane.
        decay_until_end: [C, 128] weights of the gates after each token, the same in every lane.
        chunk_decay: [1, 128] weight of all gates, the same in every lane.
    """

    pair_decay: jax.Array
    decay_since_start: jax.Array
    decay_until_end: jax.Array
    chunk_decay: jax.Array

    def read(self, left: jax.Array, state: jax.Array, exact: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk, decayed up to each token: [C, V]."""
        return dot(left, state, (1, 0), exact) * widen(self.decay_since_start, state.shape[1])

    def pair_products(self, left: jax.Array, right: jax.Array, exact: bool) -> jax.Array:
        """Returns products of all pairs of tokens, decayed: <left_i, w_ij right_j> for j <= i, else 0: [C, C]."""
        return dot(left, right, (1, 1), exact) * self.pair_decay

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, exact: bool) -> jax.Array:
        """Returns the state after the chunk."""
        # The weights multiply the writes, so that keys are not converted.
        width = state.shape[1]
        return state * widen(self.chunk_decay, width) + dot(
            key, write * widen(self.decay_until_end, width), (0, 0), exact
        )


@dataclasses.dataclass(frozen=True)
class ChannelGates:
    """One gate per key channel, head and token.

    Attributes:
        spans: Weights in blocks of 1, 2, 4, ..., C tokens; see `make_spans`.
    """

    spans: "tuple[Span, ...]"

    def read(self, left: jax.Array, state: jax.Array, exact: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk; see `HeadGates`."""
        return dot(left * self.spans[-1].decay_since_start, state, (1, 0), exact)

    def pair_products(self, left: jax.Array, right: jax.Array, exact: bool) -> jax.Array:
        """Returns products of all pairs of tokens, decayed and masked; see `HeadGates`."""
        row, column = indices(left.shape[0])
        total = jnp.where(row == column, jnp.sum(left * right, axis=1, keepdims=True), 0.0)
        for level, span in enumerate(self.spans[:-1]):
            square = dot(left * span.decay_since_start, right * span.decay_until_end, (1, 1), exact)
            total = jnp.where(is_split_at_level(row, column, level), square, total)
        return total

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, exact: bool) -> jax.Array:
        """Returns the state after the chunk; see `HeadGates`."""
        span = self.spans[-1]
        # The rows of the state are the key channels: the weights of all gates, as a column.
        row = last_row(span.decay_since_start)
        if key.shape[0] > ROWS_PER_REGISTER:
            total = jnp.broadcast_to(row, (state.shape[1], state.shape[0])).T
        else:  # steps of few tokens, which the transposition of whole states would take longest
            total = in_rows(row, state.shape[1])
        return state * total + dot(key * span.decay_until_end, write, (0, 0), exact)


@dataclasses.dataclass(frozen=True)
class NoGates:
    """No decay."""

    def read(self, left: jax.Array, state: jax.Array, exact: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk; see `HeadGates`."""
        return dot(left, state, (1, 0), exact)

    def pair_products(self, left: jax.Array, right: jax.Array, exact: bool) -> jax.Array:
        """Returns products of all pairs of tokens, masked; see `HeadGates`."""
        row, column = indices(left.shape[0])
        return jnp.where(row >= column, dot(left, right, (1, 1), exact), 0.0)

    def add(self, state: jax.Array, key: jax.Array, write: jax.Array, exact: bool) -> jax.Array:
        """Returns the state after the chunk; see `HeadGates`."""
        return state + dot(key, write, (0, 0), exact)


KeyGates = HeadGates | ChannelGates | NoGates


def key_gates(decay: jax.Array | HeadDecay | None) -> KeyGates:
    """Returns the gates of a chunk's keys from log gates [C, K], or from sums of gates that channels share."""
    if decay is None:
        return NoGates()
    return _head_gates_of_sums(decay) if isinstance(decay, HeadDecay) else ChannelGates(make_spans(decay))


def _head_gates_of_sums(sums: HeadDecay) -> HeadGates:
    """Returns the decay weights of a chunk from the sums of its log gates, one per token."""
    row, column = indices(sums.coarse.shape[0])
    # Each token's sums are in every lane, so that reading them along lanes needs no other broadcast.
    coarse, fine = _in_lanes(sums.coarse), None if sums.fine is None else _in_lanes(sums.fine)
    after = widen(coarse, row.shape[1]) - sums.coarse_row
    total, decay_until_end = coarse, last_row(coarse) - coarse
    if fine is not None and sums.fine_row is not None:
        after = after + (widen(fine, row.shape[1]) - sums.fine_row)
        total, decay_until_end = total + fine, decay_until_end + (last_row(fine) - fine)
    # Above the diagonal, and between tokens of two segments, sums may have any sign: 0 times infinity would be NaN.
    pair_decay, decay_until_end = (jnp.exp(jnp.minimum(x, MAX_EXPONENT)) for x in (after, decay_until_end))
    decay_since_start = jnp.exp(total)
    return HeadGates(
        jnp.where(row >= column, pair_decay, 0.0), decay_since_start, decay_until_end, last_row(decay_since_start)
    )


def _in_lanes_fwd(column: jax.Array) -> tuple[jax.Array, None]:
    return _in_lanes(column), None


def _in_lanes_bwd(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.sum(cotangent, axis=1, keepdims=True),)


@with_custom_gradient(_in_lanes_fwd, _in_lanes_bwd)
def _in_lanes(column: jax.Array) -> jax.Array:
    """Returns [C, 1] as [C, 128], the same in every lane."""
    return jnp.broadcast_to(column, (column.shape[0], LANES))


def _widen_fwd(x: jax.Array, width: int) -> tuple[jax.Array, None]:
    return widen(x, width), None


def _widen_bwd(width: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # The gradient goes to a single lane: the cotangents of all lanes are added up.
    lane = lax.broadcasted_iota(jnp.int32, (cotangent.shape[0], LANES), 1)
    return (jnp.where(lane == 0, jnp.sum(cotangent, axis=1, keepdims=True), 0.0),)


@with_custom_gradient(_widen_fwd, _widen_bwd, static=(1,))
def widen(x: jax.Array, width: int) -> jax.Array:
    """Returns [C, 128], the same in every lane, as [C, width]."""
    return vectors.repeat_lanes(x, width)


# --- one gate per channel --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Span:
    """Weights of the gates in blocks of one length, [C, channels].

    Attributes:
        decay_since_start: From the block's first token to each token, both included.
        decay_until_end: From the token after each token to the block's last.
    """

    decay_since_start: jax.Array
    decay_until_end: jax.Array


def make_spans(gates: jax.Array) -> tuple[Span, ...]:
    """Returns weights of log gates [C, channels] in blocks of length 1, 2, 4, ..., C, which is a power of two."""
    token = lax.broadcasted_iota(jnp.int32, gates.shape, 0)
    total = jnp.exp(gates)  # of each token's block
    found, length = [Span(total, jnp.ones_like(total))], 1
    while length < gates.shape[0]:
        # Tokens of a second block multiply the gates of the first one, those of a first block the gates of the second.
        in_second_half, other, last = (token & length) != 0, swap_blocks(total, length), found[-1]
        found.append(
            Span(
                last.decay_since_start * jnp.where(in_second_half, other, 1.0),
                last.decay_until_end * jnp.where(in_second_half, 1.0, other),
            )
        )
        total = total * other
        length *= 2
    return tuple(found)


def is_split_at_level(row: jax.Array, column: jax.Array, level: int) -> jax.Array:
    """Returns whether the smallest block that contains tokens i >= j has `2 ** (level + 1)` tokens: its halves separate
    them.
    """
    return ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) > (column >> level))


def _swap_blocks_fwd(x: jax.Array, length: int) -> tuple[jax.Array, None]:
    return swap_blocks(x, length), None


def _swap_blocks_bwd(length: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (swap_blocks(cotangent, length),)


@with_custom_gradient(_swap_blocks_fwd, _swap_blocks_bwd, static=(1,))
def swap_blocks(x: jax.Array, length: int) -> jax.Array:
    """Returns x [C, d] with every two neighbouring blocks of `length` rows exchanged."""
    if length >= ROWS_PER_REGISTER:  # whole registers
        starts = range(0, x.shape[0], length)
        parts = [x[start ^ length : (start ^ length) + length] for start in starts]
        return jnp.concatenate(parts, axis=0)
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((token & length) != 0, pltpu.roll(x, length, 0), pltpu.roll(x, x.shape[0] - length, 0))


def _in_rows_fwd(row: jax.Array, width: int) -> tuple[jax.Array, None]:
    return in_rows(row, width), None


def _in_rows_bwd(width: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.sum(cotangent.T, axis=0, keepdims=True),)


@with_custom_gradient(_in_rows_fwd, _in_rows_bwd, static=(1,))
def in_rows(row: jax.Array, width: int) -> jax.Array:
    """Returns [1, n] as [n, width], the same in every lane: one register per lane group is transposed, not `width` of
    them.
    """
    column = jnp.broadcast_to(row, (ROWS_PER_REGISTER, row.shape[1])).T[:, :1]
    return jnp.broadcast_to(column, (row.shape[1], width))


def _last_row_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return last_row(x), x


def _last_row_bwd(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return (jnp.where(token == x.shape[0] - 1, cotangent, 0.0),)


@with_custom_gradient(_last_row_fwd, _last_row_bwd)
def last_row(x: jax.Array) -> jax.Array:
    """Returns the last row of [n, d] as [1, d]."""
    return x[x.shape[0] - 1 :]
