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
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.linear_recurrence.kernels.products import dot, dot_split, row_and_column_indices
from ejkernel_pallas.tpu.mosaic import vectors
from ejkernel_pallas.tpu.mosaic.gradients import with_custom_gradient
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MAX_EXPONENT = 80.0
"""The largest exponent whose exponential is finite even after the multiplications that follow."""
ROWS_PER_REGISTER = 8
"""Rows of a float32 register."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadLogDecaySums:
    """Log gates of a chunk that all channels of a key share, summed from the first token on.

    Attributes:
        coarse_sums: [C, 1] multiples of 2 ** -8, exact; the whole sums if `fine_sums` is None.
        coarse_sums_row: [1, C] the same values as a row.
        fine_sums: [C, 1] the remainders.
        fine_sums_row: [1, C] the same values as a row.
    """

    coarse_sums: jax.Array
    coarse_sums_row: jax.Array
    fine_sums: jax.Array | None = None
    fine_sums_row: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class HeadDecayWeights:
    """One gate per head and token.

    Attributes:
        pair_decay: [C, C] the product of the decays after token j up to and including token i; 0 for j > i.
        decay_since_start: [C, 128] that of the decays up to and including each token, the same in every lane.
        decay_until_end: [C, 128] that of the decays after each token, the same in every lane.
        chunk_decay: [1, 128] that of all decays, the same in every lane.
    """

    pair_decay: jax.Array
    decay_since_start: jax.Array
    decay_until_end: jax.Array
    chunk_decay: jax.Array

    def read_state(self, query: jax.Array, state: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk, decayed up to each token: [C, V]."""
        return dot(query, state, (1, 0), keeps_float32) * widen_equal_lanes(self.decay_since_start, state.shape[1])

    def pair_products(self, left: jax.Array, right: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns products of all pairs of tokens, decayed: <left_i, w_ij right_j> for j <= i, else 0: [C, C]."""
        return dot(left, right, (1, 1), keeps_float32) * self.pair_decay

    def add(self, state: jax.Array, key: jax.Array, token_writes: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the state after the chunk."""
        # The weights multiply the writes, so that keys are not converted.
        width = state.shape[1]
        return state * widen_equal_lanes(self.chunk_decay, width) + dot(
            key, token_writes * widen_equal_lanes(self.decay_until_end, width), (0, 0), keeps_float32
        )


@dataclasses.dataclass(frozen=True)
class ChannelDecayWeights:
    """One gate per key channel, head and token.

    Attributes:
        weights_by_block_length: Weights in blocks of 1, 2, 4, ..., C tokens; see `make_block_decay_weights`.
    """

    weights_by_block_length: "tuple[BlockDecayWeights, ...]"

    def read_state_before(self, query: jax.Array, state: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk, decayed up to the token before each: [C, V]."""
        weights = shift_rows_down(self.weights_by_block_length[-1].decay_since_start, 1.0)
        return dot(query * weights, state, (1, 0), keeps_float32)

    def read_state(self, query: jax.Array, state: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk; see `HeadDecayWeights`."""
        return dot(query * self.weights_by_block_length[-1].decay_since_start, state, (1, 0), keeps_float32)

    def pair_products(self, left: jax.Array, right: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns products of all pairs of tokens, decayed and masked; see `HeadDecayWeights`."""
        tokens = left.shape[0]
        multiply = functools.partial(dot, contracted_axes=(1, 1), keeps_float32=keeps_float32)
        if (copies := right.shape[0] // tokens) > 1:  # the vectors of the low-rank term follow the keys
            # Their transitions may have norms up to 2: one pass of bfloat16 would lose digits where tokens cancel.
            multiply = multiply if keeps_float32 else functools.partial(dot_split, contracted_axes=(1, 1))
            row, column = (lax.broadcasted_iota(jnp.int32, (tokens, right.shape[0]), axis) for axis in (0, 1))
            column = column & (tokens - 1)
            total = jnp.where(row == column, multiply(left, right), 0.0)
        else:
            row, column = row_and_column_indices(tokens)
            total = jnp.where(row == column, jnp.sum(left * right, axis=1, keepdims=True), 0.0)
        for level, span in enumerate(self.weights_by_block_length[:-1]):
            until_end = repeat_rows(span.decay_until_end, copies)
            square = multiply(left * span.decay_since_start, right * until_end)
            total = jnp.where(is_split_at_level(row, column, level), square, total)
        return total

    def add(self, state: jax.Array, key: jax.Array, token_writes: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the state after the chunk; see `HeadDecayWeights`."""
        span = self.weights_by_block_length[-1]
        # A key channel is a row of the state, so the chunk's decay of each channel is needed as a column.
        row = last_row(span.decay_since_start)
        if (tokens := span.decay_until_end.shape[0]) > ROWS_PER_REGISTER:
            total = jnp.broadcast_to(row, (state.shape[1], state.shape[0])).T
        else:  # steps of few tokens, which the transposition of whole states would take longest
            total = broadcast_row_as_column(row, state.shape[1])
        until_end = repeat_rows(span.decay_until_end, key.shape[0] // tokens)
        return state * total + dot(key * until_end, token_writes, (0, 0), keeps_float32)


@dataclasses.dataclass(frozen=True)
class NoDecayWeights:
    """No decay."""

    def read_state_before(self, query: jax.Array, state: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk; see `ChannelDecayWeights`."""
        return dot(query, state, (1, 0), keeps_float32)

    def read_state(self, query: jax.Array, state: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the reads of tokens from the state before the chunk; see `HeadDecayWeights`."""
        return dot(query, state, (1, 0), keeps_float32)

    def pair_products(self, left: jax.Array, right: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns products of all pairs of tokens, masked; see `HeadDecayWeights`."""
        shape = (left.shape[0], right.shape[0])
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return jnp.where(row >= (column & (left.shape[0] - 1)), dot(left, right, (1, 1), keeps_float32), 0.0)

    def add(self, state: jax.Array, key: jax.Array, token_writes: jax.Array, keeps_float32: bool) -> jax.Array:
        """Returns the state after the chunk; see `HeadDecayWeights`."""
        return state + dot(key, token_writes, (0, 0), keeps_float32)


KeyDecayWeights = HeadDecayWeights | ChannelDecayWeights | NoDecayWeights


def make_key_decay_weights(decay: jax.Array | HeadLogDecaySums | None) -> KeyDecayWeights:
    """Returns the gates of a chunk's keys from log gates [C, K], or from sums of gates that channels share."""
    if decay is None:
        return NoDecayWeights()
    return (
        _make_head_weights(decay)
        if isinstance(decay, HeadLogDecaySums)
        else ChannelDecayWeights(make_block_decay_weights(decay))
    )


def _make_head_weights(log_decay_sums: HeadLogDecaySums) -> HeadDecayWeights:
    """Returns the decay weights of a chunk from the sums of its log gates, one per token."""
    row, column = row_and_column_indices(log_decay_sums.coarse_sums.shape[0])
    # Each token's sums are in every lane, so that reading them along lanes needs no other broadcast.
    coarse, fine = (
        _broadcast_column_to_lanes(log_decay_sums.coarse_sums),
        None if log_decay_sums.fine_sums is None else _broadcast_column_to_lanes(log_decay_sums.fine_sums),
    )
    after = widen_equal_lanes(coarse, row.shape[1]) - log_decay_sums.coarse_sums_row
    total, decay_until_end = coarse, last_row(coarse) - coarse
    if fine is not None and log_decay_sums.fine_sums_row is not None:
        after = after + (widen_equal_lanes(fine, row.shape[1]) - log_decay_sums.fine_sums_row)
        total, decay_until_end = total + fine, decay_until_end + (last_row(fine) - fine)
    # Above the diagonal, and between tokens of two segments, sums may have any sign: 0 times infinity would be NaN.
    pair_decay, decay_until_end = (jnp.exp(jnp.minimum(x, MAX_EXPONENT)) for x in (after, decay_until_end))
    decay_since_start = jnp.exp(total)
    return HeadDecayWeights(
        jnp.where(row >= column, pair_decay, 0.0), decay_since_start, decay_until_end, last_row(decay_since_start)
    )


def _broadcast_column_to_lanes_fwd(column: jax.Array) -> tuple[jax.Array, None]:
    return _broadcast_column_to_lanes(column), None


def _broadcast_column_to_lanes_bwd(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.sum(cotangent, axis=1, keepdims=True),)


@with_custom_gradient(_broadcast_column_to_lanes_fwd, _broadcast_column_to_lanes_bwd)
def _broadcast_column_to_lanes(column: jax.Array) -> jax.Array:
    """Returns [C, 1] as [C, 128], the same in every lane."""
    return jnp.broadcast_to(column, (column.shape[0], LANES))


def _widen_equal_lanes_fwd(x: jax.Array, width: int) -> tuple[jax.Array, None]:
    return widen_equal_lanes(x, width), None


def _widen_equal_lanes_bwd(width: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # The gradient goes to a single lane: the cotangents of all lanes are added up.
    lane = lax.broadcasted_iota(jnp.int32, (cotangent.shape[0], LANES), 1)
    return (jnp.where(lane == 0, jnp.sum(cotangent, axis=1, keepdims=True), 0.0),)


@with_custom_gradient(_widen_equal_lanes_fwd, _widen_equal_lanes_bwd, static_argnums=(1,))
def widen_equal_lanes(x: jax.Array, width: int) -> jax.Array:
    """Returns [C, 128], the same in every lane, as [C, width]."""
    return vectors.repeat_lanes(x, width)


# --- one gate per channel --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockDecayWeights:
    """Weights of the gates in blocks of one length, [C, channels].

    Attributes:
        decay_since_start: From the block's first token to each token, both included.
        decay_until_end: From the token after each token to the block's last.
    """

    decay_since_start: jax.Array
    decay_until_end: jax.Array


def make_block_decay_weights(log_gates: jax.Array) -> tuple[BlockDecayWeights, ...]:
    """Returns weights of log gates [C, channels] in blocks of length 1, 2, 4, ..., C, which is a power of two."""
    token = lax.broadcasted_iota(jnp.int32, log_gates.shape, 0)
    total = jnp.exp(log_gates)  # of each token's block
    found, length = [BlockDecayWeights(total, jnp.ones_like(total))], 1
    while length < log_gates.shape[0]:
        # Tokens of a second block multiply the gates of the first one, those of a first block the gates of the second.
        in_second_half, other, last = (token & length) != 0, swap_neighbouring_blocks(total, length), found[-1]
        found.append(
            BlockDecayWeights(
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


def _swap_neighbouring_blocks_fwd(x: jax.Array, block_rows: int) -> tuple[jax.Array, None]:
    return swap_neighbouring_blocks(x, block_rows), None


def _swap_neighbouring_blocks_bwd(block_rows: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (swap_neighbouring_blocks(cotangent, block_rows),)


@with_custom_gradient(_swap_neighbouring_blocks_fwd, _swap_neighbouring_blocks_bwd, static_argnums=(1,))
def swap_neighbouring_blocks(x: jax.Array, block_rows: int) -> jax.Array:
    """Returns x [C, d] with every two neighbouring blocks of `block_rows` rows exchanged."""
    if block_rows >= ROWS_PER_REGISTER:  # whole registers
        starts = range(0, x.shape[0], block_rows)
        parts = [x[start ^ block_rows : (start ^ block_rows) + block_rows] for start in starts]
        return jnp.concatenate(parts, axis=0)
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((token & block_rows) != 0, pltpu.roll(x, block_rows, 0), pltpu.roll(x, x.shape[0] - block_rows, 0))


def repeat_rows(x: jax.Array, copies: int) -> jax.Array:
    """Returns [C, d] as [copies * C, d], one copy after the other."""
    return x if copies == 1 else jnp.concatenate([x] * copies, axis=0)


def _shift_rows_down_fwd(x: jax.Array, first: float) -> tuple[jax.Array, None]:
    return shift_rows_down(x, first), None


def _shift_rows_down_bwd(first: float, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (shift_rows_up(cotangent),)


@with_custom_gradient(_shift_rows_down_fwd, _shift_rows_down_bwd, static_argnums=(1,))
def shift_rows_down(x: jax.Array, first: float) -> jax.Array:
    """Returns x [C, d] with each row at the next one, and the number `first` in row 0."""
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(token == 0, first, pltpu.roll(x, 1, 0))


def _shift_rows_up_fwd(x: jax.Array) -> tuple[jax.Array, None]:
    return shift_rows_up(x), None


def _shift_rows_up_bwd(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (shift_rows_down(cotangent, 0.0),)


@with_custom_gradient(_shift_rows_up_fwd, _shift_rows_up_bwd)
def shift_rows_up(x: jax.Array) -> jax.Array:
    """Returns x [C, d] with each row at the one before, and zeros in the last row."""
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(token == x.shape[0] - 1, 0.0, pltpu.roll(x, x.shape[0] - 1, 0))


def _broadcast_row_as_column_fwd(row: jax.Array, width: int) -> tuple[jax.Array, None]:
    return broadcast_row_as_column(row, width), None


def _broadcast_row_as_column_bwd(width: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.sum(cotangent.T, axis=0, keepdims=True),)


@with_custom_gradient(_broadcast_row_as_column_fwd, _broadcast_row_as_column_bwd, static_argnums=(1,))
def broadcast_row_as_column(row: jax.Array, width: int) -> jax.Array:
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
