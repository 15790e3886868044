"""The forward kernel: chunks of a row in order, states in VMEM between them.

HBM   x, dt          ── double buffer ──►  dt_octets, dt_x_octets    dt and dt x of a chunk
      B, C           ── double buffer ──►  write_in_all_lanes, read_in_all_lanes
VMEM  state, decay_registers   kept across chunks; in registers over the tokens of a chunk, 16 elements at a time
HBM   chunk states   ◄─ double buffer ──   the states before the chunk
      output         ◄─ double buffer ──   results_by_token + D x
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.selective_scan.kernels.tile import (
    GridStep,
    ScannedToken,
    ScanRefs,
    channel_tile_indices,
    grid_step_of,
    lanes_of_tile,
    load_by_token,
    load_tokens,
    repeat_columns_over_lanes,
    scan_tokens,
    scratch_to_states,
    state_element_rows,
    states_to_scratch,
    store_octets,
)
from ejkernel_pallas.tpu.selective_scan.spec import ScanSpec

STATE_ELEMENTS_PER_PASS = 16
"""Elements of a state in registers at a time, with their decays: half of the 64 registers."""


def selective_scan_fwd(refs: ScanRefs, *, spec: ScanSpec) -> None:
    """Computes the outputs of one chunk."""
    grid_step = grid_step_of(refs, spec)

    @pl.when(grid_step.is_first)
    def _() -> None:
        states_to_scratch(spec, grid_step, refs.initial_state, refs.state)
        states_to_scratch(spec, grid_step, refs.decay, refs.decay_registers)

    @pl.when(grid_step.has_tokens)
    def _() -> None:
        _compute_chunk(refs, spec, grid_step)

    @pl.when(grid_step.is_last)
    def _() -> None:
        scratch_to_states(spec, refs.state, refs.final_state)


def _compute_chunk(refs: ScanRefs, spec: ScanSpec, grid_step: GridStep) -> None:
    """Computes the outputs and the states of a chunk that has tokens."""
    scratch_to_states(spec, refs.state, refs.chunk_states)
    repeat_columns_over_lanes(spec, refs.write, refs.write_in_all_lanes)
    repeat_columns_over_lanes(spec, refs.read, refs.read_in_all_lanes)
    for tile in channel_tile_indices(spec):
        dt = load_tokens(refs.dt, spec, grid_step, tile)
        store_octets(refs.dt_octets, tile, dt)
        store_octets(refs.dt_x_octets, tile, dt * load_tokens(refs.x, spec, grid_step, tile))
    for group in range(spec.groups_per_step):
        for first in range(0, spec.state_size, STATE_ELEMENTS_PER_PASS):
            _scan_states(refs, spec, group, range(first, min(first + STATE_ELEMENTS_PER_PASS, spec.state_size)))
    for tile in channel_tile_indices(spec):
        x = refs.x[:, lanes_of_tile(tile)].astype(jnp.float32)
        output = load_by_token(refs.results_by_token, tile) + refs.skip[:, lanes_of_tile(tile)] * x
        refs.output[:, lanes_of_tile(tile)] = output.astype(refs.output.dtype)


def _scan_states(refs: ScanRefs, spec: ScanSpec, channel_group: int, state_elements: range) -> None:
    """Scans some elements of the states of a group of 1024 channels. The first elements store the group's outputs;
    later elements add to them.
    """
    log2_decays = [refs.decay_registers[state_element_rows(spec, channel_group, element)] for element in state_elements]

    def advance_token(token: ScannedToken, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dt, dt_x = refs.dt_octets[token.octet_rows(channel_group)], refs.dt_x_octets[token.octet_rows(channel_group)]
        output = refs.results_by_token[token.register_rows(channel_group)] if state_elements.start else None
        after: list[jax.Array] = []
        for element, log2_decay, state in zip(state_elements, log2_decays, states, strict=True):
            row = pl.ds(token.index * spec.state_size + element, 1)
            state = jnp.exp2(dt * log2_decay) * state + dt_x * refs.write_in_all_lanes[row]
            read = state * refs.read_in_all_lanes[row]
            output = read if output is None else output + read
            after.append(state)
        refs.results_by_token[token.register_rows(channel_group)] = output
        return tuple(after)

    states = tuple(refs.state[state_element_rows(spec, channel_group, element)] for element in state_elements)
    for element, state in zip(state_elements, scan_tokens(spec, advance_token, states), strict=True):
        refs.state[state_element_rows(spec, channel_group, element)] = state
