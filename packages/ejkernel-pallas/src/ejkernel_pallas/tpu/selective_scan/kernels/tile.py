"""The shared code of the selective scan's kernels: their refs, and the layout of channels and numbers in registers.

A register holds one token's 1024 channels, eight rows of 128, for one number of a state. Blocks of HBM have tokens or
numbers in rows instead. Between the two lie scratch arrays of 128 lanes, written one way and read with a stride:

    block [8 tokens, 1024 channels]  ─ rows g * 8 + t ─►  scratch [64, 128]   ─ rows t, t + 8, ... ─►  token t [8, 128]
    block [E numbers, 1024 channels] ─ rows e * 8 + g ─►  scratch [8 E, 128]  ─ rows 8 e to 8 e + 7 ─► number e [8, 128]

A load with a stride of 8 is two instructions, and one of more rows apart is eight. Scratch arrays hold a whole chunk,
which loops read at offsets that the compiler cannot fold: it would keep stored values in registers, and spill.
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
from ejkernel_pallas.tpu.selective_scan.plan import FIRST, LAST, REAL, SEQUENCE_FACTOR
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK, ScanSpec

OCTETS = CHUNK // SUBLANES
"""Registers of a chunk's tokens in each 128 channels, and iterations of a loop over tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanRefs:
    """Refs of both kernels; a field that is None is not needed. n groups of a step, all float32 but tokens.

    Attributes:
        table: int32 [B * chunks] of `Plan`, in scalar memory.
        x: [64, 1024 n].
        step: Likewise.
        write: [E, 64].
        read: [E, 64].
        decay: [E, 1024 n], A times log2 e.
        skip: [1, 1024 n].
        initial: [E, 1024 n], the states before the first chunk.
        output: As x.
        chunk_states: [E, 1024 n], the states before the chunk.
        final: [E, 1024 n], the states after the last chunk, or their cotangents.
        cotangent: As x, of the output.
        dx: As x.
        dstep: As step.
        dwrite: [1, 64 * E], summed over the step's channels.
        dread: Likewise.
        ddecay: [E, 1024 n], summed over tokens.
        dskip: [1, 1024 n], likewise.
        dinitial: [E, 1024 n].
        state: Scratch [n * E * 8, 128], the states between chunks, or their cotangents.
        rates: Scratch, likewise, `decay`.
        steps: Scratch [n * 512, 128], dt, eight tokens a register.
        inputs: Scratch, likewise, dt x.
        results: Scratch [n * 512, 128], a token a register: the output, or gradients of `inputs`.
        writes: Scratch [64 * E, 128], B of a token and number in all lanes.
        reads: Scratch, likewise, C.
        cotangents: Scratch as steps, of the output.
        step_gradients: Scratch as results, gradients of dt by way of decays.
        before: Scratch as state, the states before the chunk.
        history: Scratch [65 * 64, 128], states of eight numbers before and after every token.
        products: Scratch [64 * 64, 128], gradients of B of eight numbers for each channel.
        read_products: Scratch, likewise, of C.
        write_gradients: Scratch as writes, sums over registers and rows.
        read_gradients: Likewise.
        rate_gradients: Scratch as state.
    """

    table: Ref
    x: Ref
    step: Ref
    write: Ref
    read: Ref
    decay: Ref
    skip: Ref
    state: Ref
    rates: Ref
    steps: Ref
    inputs: Ref
    results: Ref
    writes: Ref
    reads: Ref
    initial: Ref = None
    output: Ref = None
    chunk_states: Ref = None
    final: Ref = None
    cotangent: Ref = None
    dx: Ref = None
    dstep: Ref = None
    dwrite: Ref = None
    dread: Ref = None
    ddecay: Ref = None
    dskip: Ref = None
    dinitial: Ref = None
    cotangents: Ref = None
    step_gradients: Ref = None
    before: Ref = None
    history: Ref = None
    products: Ref = None
    read_products: Ref = None
    write_gradients: Ref = None
    read_gradients: Ref = None
    rate_gradients: Ref = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A grid step.

    Attributes:
        tile: Its tile of channels.
        chunk: Its chunk.
        first: Whether that is the first of its row or sequence.
        last: Whether it is the last.
        real: Whether it has tokens.
    """

    tile: Any
    chunk: Any
    first: Any
    last: Any
    real: Any


def step_of(refs: ScanRefs, spec: ScanSpec, *, backwards: bool = False) -> Step:
    """Returns the grid step of a kernel whose grid is (rows, tiles, chunks)."""
    chunk = pl.program_id(2)
    chunk = spec.chunks - 1 - chunk if backwards else chunk
    entry = refs.table[pl.program_id(0) * spec.chunks + chunk]
    return Step(pl.program_id(1), chunk, (entry & FIRST) != 0, (entry & LAST) != 0, (entry & REAL) != 0)


def sequence_of(table: Ref, spec: ScanSpec, row: Any, chunk: Any) -> Any:
    """Returns the row or sequence of a chunk, for use in an index map."""
    return lax.div(table[row * spec.chunks + chunk], jnp.int32(SEQUENCE_FACTOR))


def lane_tiles(spec: ScanSpec) -> Iterable[int]:
    """Returns the tiles of 128 channels of a grid step."""
    return range(spec.groups * SUBLANES)


def lanes_of(tile: int) -> slice:
    """Returns the channels of a tile."""
    return slice(tile * LANES, (tile + 1) * LANES)


def store_tokens(target: Ref, tile: int, x: jax.Array) -> None:
    """Stores a tile of a chunk's tokens, [64, 128], into scratch memory, eight tokens a register."""
    group, row = divmod(tile, SUBLANES)
    for token_octet in range(OCTETS):
        begin = ((group * OCTETS + token_octet) * SUBLANES + row) * SUBLANES
        target[begin : begin + SUBLANES] = x[token_octet * SUBLANES : (token_octet + 1) * SUBLANES]


def load_results(source: Ref, tile: int) -> jax.Array:
    """Loads a tile of a chunk's tokens, [64, 128], from scratch memory in which each token is a register."""
    group, row = divmod(tile, SUBLANES)
    return source[pl.ds(group * SUBLANES * CHUNK + row, CHUNK, stride=SUBLANES)]


def number_rows(spec: ScanSpec, tile: int) -> Any:
    """Returns the rows of a tile's numbers in the scratch memory of states."""
    group, row = divmod(tile, SUBLANES)
    return pl.ds(group * spec.size * SUBLANES + row, spec.size, stride=SUBLANES)


def store_numbers(spec: ScanSpec, step: Step, source: Ref, target: Ref) -> None:
    """Stores a block [E, 1024 n] into scratch memory, zeros for what is no channel."""
    for tile in lane_tiles(spec):
        x = source[:, lanes_of(tile)].astype(jnp.float32)
        target[number_rows(spec, tile)] = jnp.where(inside(spec, step, tile, x.shape), x, 0.0) if spec.cut else x


def inside(spec: ScanSpec, step: Step, tile: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns whether the lanes of a tile are channels."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) + (step.tile * spec.block + tile * LANES) < spec.channels


def load_numbers(spec: ScanSpec, source: Ref, target: Ref) -> None:
    """Stores scratch memory into a block [E, 1024 n]."""
    for tile in lane_tiles(spec):
        target[:, lanes_of(tile)] = source[number_rows(spec, tile)].astype(target.dtype)


def load_tile(ref: Ref, spec: ScanSpec, step: Step, tile: int) -> jax.Array:
    """Loads the tokens of a tile of a block, float32 [64, 128], with zeros past the last token and the last channel."""
    x = ref[:, lanes_of(tile)].astype(jnp.float32)
    there = None
    if spec.has_partial_chunk:
        token = lax.broadcasted_iota(jnp.int32, x.shape, 0) + step.chunk * CHUNK
        there = token < spec.tokens
    if spec.cut:
        channel = inside(spec, step, tile, x.shape)
        there = channel if there is None else there & channel
    # A choice and no product: memory past the end of an array may hold NaN.
    return x if there is None else jnp.where(there, x, 0.0)


def spread(spec: ScanSpec, source: Ref, target: Ref) -> None:
    """Stores B or C of a chunk, [E, 64], with the number of every token in all lanes of a row, [64 * E, 128]."""
    columns = source[...]
    for token in range(CHUNK):
        column = jnp.broadcast_to(columns[:, token : token + 1], (spec.size, LANES))
        target[token * spec.size : (token + 1) * spec.size] = column


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a chunk and where it is in scratch memory.

    Attributes:
        base: The first token of its iteration.
        offset: How many tokens after that it is.
    """

    base: Any
    offset: int

    @property
    def number(self) -> Any:
        """Returns the index of the token in the chunk."""
        return self.base + self.offset

    def strided(self, group: int) -> Any:
        """Returns the token's rows in a layout where eight tokens of 128 channels lie together."""
        token_octet = lax.div(self.base, jnp.int32(SUBLANES))
        index = lax.rem(self.base, jnp.int32(SUBLANES)) + self.offset
        return pl.ds((group * OCTETS + token_octet) * SUBLANES * SUBLANES + index, SUBLANES, stride=SUBLANES)

    def whole(self, group: int) -> Any:
        """Returns the token's rows in a layout where each token is a register."""
        return pl.ds(pl.multiple_of((group * CHUNK + self.number) * SUBLANES, SUBLANES), SUBLANES)


def number_at(spec: ScanSpec, group: int, number: int) -> slice:
    """Returns where a number of a group lies in the scratch memory of states."""
    begin = (group * spec.size + number) * SUBLANES
    return slice(begin, begin + SUBLANES)


def over_tokens(spec: ScanSpec, body: Any, carry: Any, *, backwards: bool = False) -> Any:
    """Calls `body(token, carry)` for each token of a chunk in order, or in reverse."""
    iterations = CHUNK // spec.unroll

    def one(iteration: jax.Array, carry: Any) -> Any:
        base = (iterations - 1 - iteration if backwards else iteration) * spec.unroll
        for offset in range(spec.unroll):
            carry = body(Token(base, spec.unroll - 1 - offset if backwards else offset), carry)
        return carry

    return lax.fori_loop(jnp.int32(0), jnp.int32(iterations), one, carry)
