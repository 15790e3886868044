"""The shared code of the selective scan's kernels: refs, and the layout of channels and state elements in registers.

A register holds one token's 1024 channels, eight rows of 128, for one element of a state. Blocks of HBM have tokens or
state elements in rows instead. Scratch arrays of 128 lanes convert one to the other: written in one order, and read
with a stride in the other:

    block [8 tokens, 1024 channels]  ─ rows g * 8 + t ─►  scratch [64, 128]   ─ rows t, t + 8, ... ─►  token t [8, 128]
    block [E elements, 1024 channels] ─ rows e * 8 + g ─► scratch [8 E, 128] ─ rows 8 e to 8 e + 7 ─► element e

A load with a stride of 8 rows takes two instructions; with a larger stride it takes eight. Scratch arrays hold a whole
chunk, which loops read at offsets that the compiler cannot fold: it would keep stored values in registers, and spill.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.selective_scan.plan import (
    ENTRY_SEQUENCE_STRIDE,
    HAS_TOKENS_FLAG,
    IS_FIRST_CHUNK_FLAG,
    IS_LAST_CHUNK_FLAG,
)
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK_TOKENS, ScanSpec

OCTETS_PER_CHUNK = CHUNK_TOKENS // SUBLANES
"""Groups of eight tokens in a chunk: registers that hold its tokens for 128 channels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanRefs:
    """Refs of both kernels; a field that is None is not needed. A grid step has n groups of 1024 channels; all
    but the blocks of tokens are float32.

    Attributes:
        chunk_table: int32 [B * chunks] of `ScanPlan`, in scalar memory.
        x: [64, 1024 n], the inputs of the chunk's tokens.
        dt: [64, 1024 n], their step sizes.
        write: [E, 64], B of the chunk, with tokens in lanes.
        read: [E, 64], C of the chunk.
        decay: [E, 1024 n], A times log2 e.
        skip: [1, 1024 n], D.
        initial_state: [E, 1024 n], the states before the first chunk.
        output: [64, 1024 n].
        chunk_states: [E, 1024 n], the states before the chunk.
        final_state: [E, 1024 n], the states after the last chunk, or their cotangents.
        cotangent: [64, 1024 n], the cotangent of the output.
        dx: [64, 1024 n].
        dstep: [64, 1024 n], the gradient of dt.
        dwrite: [1, 64 * E], the gradient of B, summed over the step's channels.
        dread: [1, 64 * E], the gradient of C.
        ddecay: [E, 1024 n], summed over tokens.
        dskip: [1, 1024 n], summed over tokens.
        dinitial_state: [E, 1024 n].
        state: Scratch [n * E * 8, 128], the states between chunks, or their cotangents.
        decay_registers: Scratch [n * E * 8, 128], `decay` in the layout of `state`.
        dt_octets: Scratch [n * 512, 128], dt, with eight tokens of 128 channels in a register.
        dt_x_octets: Scratch [n * 512, 128], dt x, in the same layout.
        results_by_token: Scratch [n * 512, 128], with one token in a register: the output, or the gradients of dt x.
        write_in_all_lanes: Scratch [64 * E, 128], B of a token and state element, repeated in all lanes.
        read_in_all_lanes: Scratch [64 * E, 128], C in the same layout.
        cotangent_octets: Scratch [n * 512, 128], the cotangent of the output in the layout of `dt_octets`.
        dt_gradients_by_token: Scratch [n * 512, 128], the gradients of dt through the decays.
        states_before_chunk: Scratch [n * E * 8, 128], `chunk_states` in the layout of `state`.
        state_history: Scratch [65 * 64, 128], eight elements of the states before and after every token.
        dwrite_by_channel: Scratch [64 * 64, 128], gradients of eight elements of B for each token and channel.
        dread_by_channel: Scratch [64 * 64, 128], those of C.
        dwrite_by_lane: Scratch [64 * E, 128], `dwrite_by_channel` summed over registers and rows.
        dread_by_lane: Scratch [64 * E, 128], `dread_by_channel` summed in the same way.
        decay_gradients: Scratch [n * E * 8, 128], in the layout of `state`.
    """

    chunk_table: Ref
    x: Ref
    dt: Ref
    write: Ref
    read: Ref
    decay: Ref
    skip: Ref
    state: Ref
    decay_registers: Ref
    dt_octets: Ref
    dt_x_octets: Ref
    results_by_token: Ref
    write_in_all_lanes: Ref
    read_in_all_lanes: Ref
    initial_state: Ref = None
    output: Ref = None
    chunk_states: Ref = None
    final_state: Ref = None
    cotangent: Ref = None
    dx: Ref = None
    dstep: Ref = None
    dwrite: Ref = None
    dread: Ref = None
    ddecay: Ref = None
    dskip: Ref = None
    dinitial_state: Ref = None
    cotangent_octets: Ref = None
    dt_gradients_by_token: Ref = None
    states_before_chunk: Ref = None
    state_history: Ref = None
    dwrite_by_channel: Ref = None
    dread_by_channel: Ref = None
    dwrite_by_lane: Ref = None
    dread_by_lane: Ref = None
    decay_gradients: Ref = None


@dataclasses.dataclass(frozen=True)
class GridStep:
    """A grid step of a kernel.

    Attributes:
        channel_tile: Index of its tile of channels.
        chunk: Index of its chunk in the row.
        is_first: Whether that chunk is the first of its row or packed sequence.
        is_last: Whether that chunk is the last of its row or packed sequence.
        has_tokens: Whether that chunk has tokens.
    """

    channel_tile: Any
    chunk: Any
    is_first: Any
    is_last: Any
    has_tokens: Any


def grid_step_of(refs: ScanRefs, spec: ScanSpec, *, reverses_chunks: bool = False) -> GridStep:
    """Returns the grid step of a kernel whose grid is (rows, tiles, chunks)."""
    chunk = pl.program_id(2)
    chunk = spec.chunks_per_row - 1 - chunk if reverses_chunks else chunk
    entry = refs.chunk_table[pl.program_id(0) * spec.chunks_per_row + chunk]
    return GridStep(
        pl.program_id(1),
        chunk,
        (entry & IS_FIRST_CHUNK_FLAG) != 0,
        (entry & IS_LAST_CHUNK_FLAG) != 0,
        (entry & HAS_TOKENS_FLAG) != 0,
    )


def read_sequence_of_chunk(table: Ref, spec: ScanSpec, row: Any, chunk: Any) -> Any:
    """Returns the row or sequence of a chunk, for use in an index map."""
    return lax.div(table[row * spec.chunks_per_row + chunk], jnp.int32(ENTRY_SEQUENCE_STRIDE))


def channel_tile_indices(spec: ScanSpec) -> Iterable[int]:
    """Returns the tiles of 128 channels of a grid step."""
    return range(spec.groups_per_step * SUBLANES)


def lanes_of_tile(tile: int) -> slice:
    """Returns the channels of a tile."""
    return slice(tile * LANES, (tile + 1) * LANES)


def store_octets(target: Ref, tile: int, x: jax.Array) -> None:
    """Stores a tile of a chunk's tokens, [64, 128], into scratch memory, with eight tokens in a register."""
    group, row = divmod(tile, SUBLANES)
    for token_octet in range(OCTETS_PER_CHUNK):
        begin = ((group * OCTETS_PER_CHUNK + token_octet) * SUBLANES + row) * SUBLANES
        target[begin : begin + SUBLANES] = x[token_octet * SUBLANES : (token_octet + 1) * SUBLANES]


def load_by_token(source: Ref, tile: int) -> jax.Array:
    """Loads a tile of a chunk's tokens, [64, 128], from scratch memory that has one token in a register."""
    group, row = divmod(tile, SUBLANES)
    return source[pl.ds(group * SUBLANES * CHUNK_TOKENS + row, CHUNK_TOKENS, stride=SUBLANES)]


def state_tile_rows(spec: ScanSpec, tile: int) -> Any:
    """Returns the rows of the scratch memory of states that hold a tile of 128 channels."""
    group, row = divmod(tile, SUBLANES)
    return pl.ds(group * spec.state_size * SUBLANES + row, spec.state_size, stride=SUBLANES)


def states_to_scratch(spec: ScanSpec, grid_step: GridStep, source: Ref, target: Ref) -> None:
    """Stores a block [E, 1024 n] into scratch memory, with zeros past the last channel."""
    for tile in channel_tile_indices(spec):
        x = source[:, lanes_of_tile(tile)].astype(jnp.float32)
        target[state_tile_rows(spec, tile)] = (
            jnp.where(is_real_channel(spec, grid_step, tile, x.shape), x, 0.0) if spec.has_partial_channel_tile else x
        )


def is_real_channel(spec: ScanSpec, grid_step: GridStep, tile: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns whether the lanes of a tile are channels."""
    return (
        lax.broadcasted_iota(jnp.int32, shape, 1) + (grid_step.channel_tile * spec.channels_per_step + tile * LANES)
        < spec.channels
    )


def scratch_to_states(spec: ScanSpec, source: Ref, target: Ref) -> None:
    """Stores scratch memory into a block [E, 1024 n]."""
    for tile in channel_tile_indices(spec):
        target[:, lanes_of_tile(tile)] = source[state_tile_rows(spec, tile)].astype(target.dtype)


def load_tokens(ref: Ref, spec: ScanSpec, grid_step: GridStep, tile: int) -> jax.Array:
    """Loads the tokens of a tile of a block, float32 [64, 128], with zeros past the last token and the last channel."""
    x = ref[:, lanes_of_tile(tile)].astype(jnp.float32)
    is_valid = None
    if spec.has_partial_chunk:
        token = lax.broadcasted_iota(jnp.int32, x.shape, 0) + grid_step.chunk * CHUNK_TOKENS
        is_valid = token < spec.tokens_per_row
    if spec.has_partial_channel_tile:
        channel = is_real_channel(spec, grid_step, tile, x.shape)
        is_valid = channel if is_valid is None else is_valid & channel
    # Selected, not multiplied: memory past the end of an array may hold NaN.
    return x if is_valid is None else jnp.where(is_valid, x, 0.0)


def repeat_columns_over_lanes(spec: ScanSpec, source: Ref, target: Ref) -> None:
    """Stores B or C of a chunk, [E, 64], with each token's element in all lanes of a row, [64 * E, 128]."""
    columns = source[...]
    for token in range(CHUNK_TOKENS):
        column = jnp.broadcast_to(columns[:, token : token + 1], (spec.state_size, LANES))
        target[token * spec.state_size : (token + 1) * spec.state_size] = column


@dataclasses.dataclass(frozen=True)
class ScannedToken:
    """A token of a chunk, in a loop that processes several tokens per iteration.

    Attributes:
        first_token_of_iteration: Index in the chunk of the first token of the loop's iteration.
        offset: Index of this token in the iteration.
    """

    first_token_of_iteration: Any
    offset: int

    @property
    def index(self) -> Any:
        """Returns the index of the token in the chunk."""
        return self.first_token_of_iteration + self.offset

    def octet_rows(self, channel_group: int) -> Any:
        """Returns the token's rows in a layout with eight tokens of 128 channels in a register."""
        token_octet = lax.div(self.first_token_of_iteration, jnp.int32(SUBLANES))
        index = lax.rem(self.first_token_of_iteration, jnp.int32(SUBLANES)) + self.offset
        return pl.ds(
            (channel_group * OCTETS_PER_CHUNK + token_octet) * SUBLANES * SUBLANES + index, SUBLANES, stride=SUBLANES
        )

    def register_rows(self, channel_group: int) -> Any:
        """Returns the token's rows in a layout with one token in a register."""
        return pl.ds(pl.multiple_of((channel_group * CHUNK_TOKENS + self.index) * SUBLANES, SUBLANES), SUBLANES)


def state_element_rows(spec: ScanSpec, channel_group: int, state_element: int) -> slice:
    """Returns the rows of the scratch memory of states that hold one element of a group's channels."""
    begin = (channel_group * spec.state_size + state_element) * SUBLANES
    return slice(begin, begin + SUBLANES)


def scan_tokens(spec: ScanSpec, body: Any, carry: Any, *, scans_in_reverse: bool = False) -> Any:
    """Calls `body(token, carry)` for each token of a chunk in order, or in reverse."""
    iterations = CHUNK_TOKENS // spec.unrolled_tokens

    def run_unrolled_tokens(iteration: jax.Array, carry: Any) -> Any:
        first_token_of_iteration = (
            iterations - 1 - iteration if scans_in_reverse else iteration
        ) * spec.unrolled_tokens
        for offset in range(spec.unrolled_tokens):
            carry = body(
                ScannedToken(
                    first_token_of_iteration, spec.unrolled_tokens - 1 - offset if scans_in_reverse else offset
                ),
                carry,
            )
        return carry

    return lax.fori_loop(jnp.int32(0), jnp.int32(iterations), run_unrolled_tokens, carry)
