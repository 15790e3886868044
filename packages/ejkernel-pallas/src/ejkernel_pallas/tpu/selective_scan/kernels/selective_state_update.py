"""The kernel that updates states in slots: few tokens of each sequence, and the slots in place.

grid (tiles of channels, chunks that have tokens)        chunks in order; a step of decoding is one chunk a sequence
HBM   slots [S, E, I]  ── the block of the chunk's slot, double buffer ──►  initial  ─┐
      x, dt            ── double buffer ──►  up to 8 tokens a register                ├─►  state in registers
      B, C             ── double buffer ──►  columns, each number in all lanes       ─┘        │
HBM   output           ◄─ double buffer ──   sums over the numbers of a state  ◄───────────────┤
      slots            ◄─ double buffer ──   final, the memory of `initial`    ◄── state ◄─────┘   VMEM, between chunks

Channels are in lanes and the numbers of a state in rows, as slots lie in memory: nothing is rearranged, since a state
that is read for one token is not worth it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import for_each_index
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, repeat_lanes
from ejkernel_pallas.tpu.selective_scan.spec import UpdateSpec

STRIP_REGISTERS = 8
"""Registers of a state that are updated together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRefs:
    """Refs of the kernel. Blocks have w channels, and c tokens in each of o octets.

    Attributes:
        table: int32 [chunks] of `slot_table`, in scalar memory.
        x: [o, c, w].
        step: As x.
        columns: float32 [o, E, 2 c], B of each token, and then C.
        decay: float32 [E, w], A times log2 e.
        skip: float32 [1, w].
        initial: [E, w], the slot before the sequence.
        output: As x.
        final: [E, w], the slot after the sequence.
        state: Scratch, float32 [E, w], the state between chunks.
        spread: Scratch, float32 [2 c, E, 128], columns of an octet, each number in all lanes.
        rows: Scratch, float32 [2 c, strip], dt of each token of a strip of channels, and then dt x.
    """

    table: Ref
    x: Ref
    step: Ref
    columns: Ref
    decay: Ref
    skip: Ref
    initial: Ref
    output: Ref
    final: Ref
    state: Ref
    spread: Ref
    rows: Ref


def selective_state_update(refs: UpdateRefs, *, spec: UpdateSpec) -> None:
    """Updates the state of one chunk's sequence, and computes the outputs of the chunk's tokens."""
    chunk = pl.program_id(1)
    entry = refs.table[chunk]
    is_first, is_last, keeps = (entry & 2) != 0, (entry & 1) != 0, (entry & 4) != 0

    # The first chunk's block goes back to a slot even where no step stores it.
    @pl.when((chunk == 0) & ~keeps)
    def _() -> None:
        refs.final[...] = refs.initial[...]

    @pl.when(is_first)
    def _() -> None:
        # A choice and no product: the slot of another sequence may hold NaN.
        refs.state[...] = jnp.where(keeps, refs.initial[...].astype(jnp.float32), 0.0)

    width = strip_channels(spec)

    def octet(number: Any) -> None:
        _spread(refs, spec, number)
        if spec.block >= width:
            for_each_index(spec.block // width, lambda n: _update(refs, spec, number, _strip(n, width)))
        if spec.block % width:
            _update(refs, spec, number, pl.ds(spec.block - spec.block % width, spec.block % width))

    for_each_index(spec.octets, octet)

    @pl.when(is_last & keeps)
    def _() -> None:
        refs.final[...] = refs.state[...].astype(refs.final.dtype)


def strip_channels(spec: UpdateSpec) -> int:
    """Returns the channels that are updated together."""
    return LANES * max(1, STRIP_REGISTERS // cdiv(spec.size, SUBLANES))


def _strip(number: Any, width: int) -> Any:
    """Returns the channels of a strip."""
    return pl.ds(pl.multiple_of(number * width, width), width)


def _spread(refs: UpdateRefs, spec: UpdateSpec, octet: Any) -> None:
    """Stores B and C of an octet's tokens with each number in all lanes."""
    columns = refs.columns[octet]
    for token in range(2 * spec.tokens):
        refs.spread[token] = jnp.broadcast_to(columns[:, token : token + 1], (spec.size, LANES))


def _update(refs: UpdateRefs, spec: UpdateSpec, octet: Any, lanes: Any) -> None:
    """Updates the states of some channels by the tokens of an octet, and stores their outputs."""
    x, steps = (ref[octet, :, lanes].astype(jnp.float32) for ref in (refs.x, refs.step))
    width = lanes.size
    # A row of memory is loaded into all rows of a register; a row of a register would have to be spread.
    refs.rows[: spec.tokens, :width], refs.rows[spec.tokens :, :width] = steps, steps * x
    rates, state = refs.decay[:, lanes], refs.state[:, lanes]
    reads: list[jax.Array] = []
    for token in range(spec.tokens):
        step, added = (refs.rows[row : row + 1, :width] for row in (token, spec.tokens + token))
        state = jnp.exp2(step * rates) * state + added * repeat_lanes(refs.spread[token], width)
        read = state * repeat_lanes(refs.spread[spec.tokens + token], width)
        reads.append(jnp.sum(read, axis=0, keepdims=True))
    refs.state[:, lanes] = state
    output = jnp.concatenate(reads, axis=0) + refs.skip[:, lanes] * x
    refs.output[octet, :, lanes] = output.astype(refs.output.dtype)
