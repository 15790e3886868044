"""The kernel that updates states in slots: few tokens of each sequence, and the slots in place.

grid (tiles of channels, chunks that have tokens)        chunks in order; a decode step has one chunk per sequence
HBM   slots [S, E, I]  ── the block of the chunk's slot, double buffer ──►  initial_state ─┐
      x, dt            ── double buffer ──►  up to 8 tokens per register                   ├─►  state in registers
      B, C             ── double buffer ──►  write_and_read_in_all_lanes                  ─┘        │
HBM   output           ◄─ double buffer ──   sums over the elements of a state  ◄───────────────────┤
      slots            ◄─ double buffer ──   final_state, in the memory of initial_state ◄── state ◄┘   VMEM

Channels are in lanes and the elements of a state in rows, which is the layout of slots in memory. Nothing is
rearranged: that would take longer than the few tokens that read a state.
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

STATE_REGISTERS_PER_STRIP = 8
"""The number of registers of a state that are updated together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRefs:
    """Refs of the kernel. Blocks have w channels, and c tokens in each of o octets.

    Attributes:
        table: int32 [chunks] of `slot_table`, in scalar memory.
        x: [o, c, w], the inputs.
        dt: [o, c, w], the step sizes.
        write_and_read: float32 [o, E, 2 c], B of each token, and then C.
        decay: float32 [E, w], A times log2 e.
        skip: float32 [1, w], D.
        initial_state: [E, w], the slot before the sequence.
        output: [o, c, w].
        final_state: [E, w], the slot after the sequence.
        state: Scratch, float32 [E, w], the state between chunks.
        write_and_read_in_all_lanes: Scratch, float32 [2 c, E, 128], `write_and_read` of an octet, each element in all
            lanes.
        dt_and_dt_x_rows: Scratch, float32 [2 c, strip], dt of each token for a strip of channels, and then dt x of
            each.
    """

    chunk_table: Ref
    x: Ref
    dt: Ref
    write_and_read: Ref
    decay: Ref
    skip: Ref
    initial_state: Ref
    output: Ref
    final_state: Ref
    state: Ref
    write_and_read_in_all_lanes: Ref
    dt_and_dt_x_rows: Ref


def selective_state_update(refs: UpdateRefs, *, spec: UpdateSpec) -> None:
    """Updates the state of one chunk's sequence, and computes the outputs of the chunk's tokens."""
    chunk = pl.program_id(1)
    entry = refs.chunk_table[chunk]
    is_first, is_last, has_slot = (entry & 2) != 0, (entry & 1) != 0, (entry & 4) != 0

    # The first chunk's block goes back to a slot even where no step stores it.
    @pl.when((chunk == 0) & ~has_slot)
    def _() -> None:
        refs.final_state[...] = refs.initial_state[...]

    @pl.when(is_first)
    def _() -> None:
        # Selected, not multiplied: the slot of another sequence may hold NaN.
        refs.state[...] = jnp.where(has_slot, refs.initial_state[...].astype(jnp.float32), 0.0)

    width = strip_channels(spec)

    def update_octet(token_octet: Any) -> None:
        _repeat_columns_over_lanes(refs, spec, token_octet)
        if spec.channels_per_step >= width:
            for_each_index(
                spec.channels_per_step // width,
                lambda n: _update_strip(refs, spec, token_octet, _strip_lanes(n, width)),
            )
        if spec.channels_per_step % width:
            _update_strip(
                refs,
                spec,
                token_octet,
                pl.ds(spec.channels_per_step - spec.channels_per_step % width, spec.channels_per_step % width),
            )

    for_each_index(spec.octets_per_chunk, update_octet)

    @pl.when(is_last & has_slot)
    def _() -> None:
        refs.final_state[...] = refs.state[...].astype(refs.final_state.dtype)


def strip_channels(spec: UpdateSpec) -> int:
    """Returns the number of channels that are updated together."""
    return LANES * max(1, STATE_REGISTERS_PER_STRIP // cdiv(spec.state_size, SUBLANES))


def _strip_lanes(strip_index: Any, width: int) -> Any:
    """Returns the range of a strip's channels."""
    return pl.ds(pl.multiple_of(strip_index * width, width), width)


def _repeat_columns_over_lanes(refs: UpdateRefs, spec: UpdateSpec, token_octet: Any) -> None:
    """Stores B and C of an octet's tokens with each element in all lanes."""
    columns = refs.write_and_read[token_octet]
    for token in range(2 * spec.tokens_per_octet):
        refs.write_and_read_in_all_lanes[token] = jnp.broadcast_to(
            columns[:, token : token + 1], (spec.state_size, LANES)
        )


def _update_strip(refs: UpdateRefs, spec: UpdateSpec, token_octet: Any, lanes: Any) -> None:
    """Updates the states of some channels by the tokens of an octet, and stores their outputs."""
    x, dt = (ref[token_octet, :, lanes].astype(jnp.float32) for ref in (refs.x, refs.dt))
    width = lanes.size
    # A load repeats a row of memory in all rows of a register; a row of a register needs an extra instruction for that.
    refs.dt_and_dt_x_rows[: spec.tokens_per_octet, :width], refs.dt_and_dt_x_rows[spec.tokens_per_octet :, :width] = (
        dt,
        dt * x,
    )
    log2_decays, state = refs.decay[:, lanes], refs.state[:, lanes]
    reads: list[jax.Array] = []
    for token in range(spec.tokens_per_octet):
        dt_row, dt_x_row = (
            refs.dt_and_dt_x_rows[row : row + 1, :width] for row in (token, spec.tokens_per_octet + token)
        )
        state = jnp.exp2(dt_row * log2_decays) * state + dt_x_row * repeat_lanes(
            refs.write_and_read_in_all_lanes[token], width
        )
        read = state * repeat_lanes(refs.write_and_read_in_all_lanes[spec.tokens_per_octet + token], width)
        reads.append(jnp.sum(read, axis=0, keepdims=True))
    refs.state[:, lanes] = state
    output = jnp.concatenate(reads, axis=0) + refs.skip[:, lanes] * x
    refs.output[token_octet, :, lanes] = output.astype(refs.output.dtype)
