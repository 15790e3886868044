"""The kernel that updates states in slots: few tokens of each packed sequence, one after the other.

    grid (tiles of 1024 channels)            all slots and all tokens of a tile are in VMEM at once
    HBM   slots [W - 1, S, C] ── double buffer ──►  states_by_row  ─┐ the sequence's slot
          x                   ── double buffer ──►  tokens_by_row   ├─► W - 1 tokens in registers, token by token
    HBM   output              ◄─ double buffer ──   outputs_by_row ◄┤
          slots               ◄─ double buffer ──   states_by_row  ◄┘ in the memory of the slots that were read

XLA lays slots [S, C, W - 1] of three tokens out with slots in rows: eight of them are a tile, and no copy takes fewer.
So a step copies all slots, with the bandwidth of large copies, instead of the tiles of its sequences one by one.

A block has a token in each row of a register. Scratch memory has a register for each token: eight rows of 128 channels,
which stores with a stride of eight rows arrange.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.causal_convolution.kernels.tile import apply_activation
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRefs:
    """Refs of the kernel. Blocks have c channels, at most 1024.

    Attributes:
        sequence_bounds: int32 [N + 1], in scalar memory.
        slot_of_sequence: int32 [N], in scalar memory; negative for a sequence without a slot.
        x: [T, c], the inputs.
        weights: float32 [W + 1, 8, 128] of `plan.weights_by_row`.
        initial_states: [W - 1, S, c], all slots.
        output: [T, c].
        final_states: [W - 1, S, c], all slots after the step.
        tokens_by_row: Scratch, float32 [T * 8, 128], the channels of a token in eight rows.
        outputs_by_row: Scratch, float32 [T * 8, 128].
        states_by_row: Scratch, float32 [W - 1, S * 8, 128].
    """

    sequence_bounds: Ref
    slot_of_sequence: Ref
    x: Ref
    weights: Ref
    initial_states: Ref
    output: Ref
    final_states: Ref
    tokens_by_row: Ref
    outputs_by_row: Ref
    states_by_row: Ref


def causal_conv_update(refs: UpdateRefs, *, spec: ConvolutionSpec) -> None:
    """Computes the outputs of a tile's channels, and updates their slots."""
    _store_by_row(refs.x[...], refs.tokens_by_row)
    for k in range(spec.filter_width - 1):
        _store_by_row(refs.initial_states[k], refs.states_by_row.at[k])
    # Padding tokens, which no sequence writes, have output 0.
    refs.outputs_by_row[...] = jnp.zeros_like(refs.outputs_by_row)
    for_each_index(refs.slot_of_sequence.shape[0], lambda sequence: _update_sequence(refs, spec, sequence))
    _load_by_row(refs.outputs_by_row, refs.output)
    for k in range(spec.filter_width - 1):
        _load_by_row(refs.states_by_row.at[k], refs.final_states.at[k])


def _update_sequence(refs: UpdateRefs, spec: ConvolutionSpec, sequence: Any) -> None:
    """Computes the outputs of a sequence's tokens, and stores its last tokens in its slot."""
    slot, num_state_tokens = refs.slot_of_sequence[sequence], spec.filter_width - 1
    begin, end = refs.sequence_bounds[sequence], refs.sequence_bounds[sequence + 1]
    has_slot, slot_rows = slot >= 0, _rows(jnp.maximum(slot, 0))

    @pl.when(end > begin)
    def _() -> None:
        # Selected, not multiplied: the slot of another sequence may hold NaN. States are read in the dtype of x.
        before = tuple(
            jnp.where(has_slot, refs.states_by_row[k, slot_rows], 0.0).astype(refs.x.dtype).astype(jnp.float32)
            for k in range(num_state_tokens)
        )

        def convolve_token(token: Any, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            window = (*before, refs.tokens_by_row[_rows(token)])
            total = refs.weights[spec.filter_width]
            for k in range(spec.filter_width):
                total = total + refs.weights[k] * window[num_state_tokens - k]
            refs.outputs_by_row[_rows(token)] = apply_activation(spec, total)
            return window[1:]

        after = fori_loop(begin, end, convolve_token, before)

        @pl.when(has_slot)
        def _() -> None:
            for k, state in enumerate(after):
                refs.states_by_row[k, slot_rows] = state


def _rows(index: Any) -> Any:
    """Returns the rows of a token or slot in scratch memory."""
    return pl.ds(pl.multiple_of(index * SUBLANES, SUBLANES), SUBLANES)


def _lane_groups(channels: int) -> list[slice]:
    """Returns the slices of channels that the rows of scratch memory hold for a token, 128 channels each."""
    return [slice(begin, min(begin + LANES, channels)) for begin in range(0, channels, LANES)]


def _store_by_row(x: jax.Array, target: Ref) -> None:
    """Stores a block [n, c] into scratch memory [n * 8, 128], in float32."""
    for row, lanes in enumerate(_lane_groups(x.shape[1])):
        part = x[:, lanes].astype(jnp.float32)
        part = jnp.pad(part, ((0, 0), (0, LANES - part.shape[1]))) if part.shape[1] < LANES else part
        target[pl.ds(row, x.shape[0], stride=SUBLANES)] = part


def _load_by_row(source: Ref, target: Ref) -> None:
    """Stores scratch memory [n * 8, 128] into a block [n, c]."""
    for row, lanes in enumerate(_lane_groups(target.shape[1])):
        part = source[pl.ds(row, target.shape[0], stride=SUBLANES)]
        target[:, lanes] = part[:, : lanes.stop - lanes.start].astype(target.dtype)
