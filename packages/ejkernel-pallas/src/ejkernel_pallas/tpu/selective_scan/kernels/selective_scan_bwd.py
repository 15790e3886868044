"""The backward kernel: chunks of a row in reverse, the states' cotangents in VMEM between them.

    HBM   x, dt, cotangent ─ double buffer ─►  dt_octets, dt_x_octets, cotangent_octets
          chunk states     ─ double buffer ─►  states_before_chunk
    VMEM  state_history   forwards:  the state before and after every token, eight elements at a time
          state           backwards: the cotangent of the state after a token, in registers over the tokens of a chunk
          dwrite_by_channel, dread_by_channel  gradients of B and C for every token and element, 1024 channels each
    HBM   dx, dt's gradient ◄─ double buffer ─  results_by_token, dt_gradients_by_token
          dB, dC            ◄─ double buffer ─  these, summed over rows and then over lanes
          dA, dD            ◄─ once per row ─   sums over tokens

With h the state after a token and h' before it, a = exp(dt A), u = dt x, and G the cotangent of h from later tokens:

    g = G + C dy       dC = sum of h dy       dB = sum of g u       du = sum of g B
    q = g a h'         d(dt) = sum of q A + x du       dA = sum of q dt       G' = g a
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LN2
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
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
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK_TOKENS, ScanSpec

STATE_ELEMENTS_PER_PASS = 8
"""Elements of a state at a time: their history takes 2 MiB, and their sums fit registers."""


def selective_scan_bwd(refs: ScanRefs, *, spec: ScanSpec) -> None:
    """Computes the gradients of one chunk."""
    grid_step = grid_step_of(refs, spec, reverses_chunks=True)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        states_to_scratch(spec, grid_step, refs.decay, refs.decay_registers)
        refs.decay_gradients[...] = jnp.zeros_like(refs.decay_gradients)
        refs.dskip[...] = jnp.zeros_like(refs.dskip)

    @pl.when(grid_step.is_last)
    def _() -> None:
        states_to_scratch(spec, grid_step, refs.final_state, refs.state)

    @pl.when(grid_step.has_tokens)
    def _() -> None:
        _compute_chunk(refs, spec, grid_step)

    @pl.when(jnp.logical_not(grid_step.has_tokens))
    def _() -> None:
        refs.dwrite[...] = jnp.zeros_like(refs.dwrite)
        refs.dread[...] = jnp.zeros_like(refs.dread)

    @pl.when(grid_step.is_first)
    def _() -> None:
        scratch_to_states(spec, refs.state, refs.dinitial_state)

    @pl.when(pl.program_id(2) == spec.chunks_per_row - 1)
    def _() -> None:
        scratch_to_states(spec, refs.decay_gradients, refs.ddecay)


def _compute_chunk(refs: ScanRefs, spec: ScanSpec, grid_step: GridStep) -> None:
    """Computes the gradients of a chunk that has tokens."""
    repeat_columns_over_lanes(spec, refs.write, refs.write_in_all_lanes)
    repeat_columns_over_lanes(spec, refs.read, refs.read_in_all_lanes)
    states_to_scratch(spec, grid_step, refs.chunk_states, refs.states_before_chunk)
    for tile in channel_tile_indices(spec):
        dt = load_tokens(refs.dt, spec, grid_step, tile)
        store_octets(refs.dt_octets, tile, dt)
        store_octets(refs.dt_x_octets, tile, dt * load_tokens(refs.x, spec, grid_step, tile))
        store_octets(refs.cotangent_octets, tile, load_tokens(refs.cotangent, spec, grid_step, tile))
    for first in range(0, spec.state_size, STATE_ELEMENTS_PER_PASS):
        elements = range(first, min(first + STATE_ELEMENTS_PER_PASS, spec.state_size))
        for group in range(spec.groups_per_step):
            _recompute_states(refs, spec, group, elements)
            _scan_gradients_backwards(refs, spec, group, elements)
        _sum_products_over_rows(refs, spec, elements)
    _sum_lanes(refs.dwrite_by_lane, refs.dwrite)
    _sum_lanes(refs.dread_by_lane, refs.dread)
    for tile in channel_tile_indices(spec):
        _store_token_gradients(refs, spec, grid_step, tile)


def _history_rows(token: Any, index: int) -> Any:
    """Returns the rows of `state_history` with one element of the states before a token."""
    return pl.ds(pl.multiple_of((token * STATE_ELEMENTS_PER_PASS + index) * SUBLANES, SUBLANES), SUBLANES)


def _write_or_read_row_slice(spec: ScanSpec, token: ScannedToken, state_element: int) -> Any:
    """Returns the row of `write_in_all_lanes` or `read_in_all_lanes` with B or C of a token and a state element."""
    return pl.ds(token.index * spec.state_size + state_element, 1)


def _recompute_states(refs: ScanRefs, spec: ScanSpec, channel_group: int, state_elements: range) -> None:
    """Stores some elements of the states before every token, and after the last."""
    log2_decays = [refs.decay_registers[state_element_rows(spec, channel_group, element)] for element in state_elements]

    def advance_token(token: ScannedToken, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dt, dt_x = refs.dt_octets[token.octet_rows(channel_group)], refs.dt_x_octets[token.octet_rows(channel_group)]
        after: list[jax.Array] = []
        for index, (element, log2_decay, state) in enumerate(zip(state_elements, log2_decays, states, strict=True)):
            state = (
                jnp.exp2(dt * log2_decay) * state
                + dt_x * refs.write_in_all_lanes[_write_or_read_row_slice(spec, token, element)]
            )
            refs.state_history[_history_rows(token.index + 1, index)] = state
            after.append(state)
        return tuple(after)

    states = tuple(
        refs.states_before_chunk[state_element_rows(spec, channel_group, element)] for element in state_elements
    )
    for index, state in enumerate(states):
        refs.state_history[_history_rows(0, index)] = state
    scan_tokens(spec, advance_token, states)


def _scan_gradients_backwards(refs: ScanRefs, spec: ScanSpec, channel_group: int, state_elements: range) -> None:
    """Adds the gradients that flow through some elements of a group's states."""
    log2_decays = [refs.decay_registers[state_element_rows(spec, channel_group, element)] for element in state_elements]

    def scan_token_gradients(token: ScannedToken, carry: tuple[tuple[jax.Array, jax.Array], ...]) -> Any:
        dt, dt_x = refs.dt_octets[token.octet_rows(channel_group)], refs.dt_x_octets[token.octet_rows(channel_group)]
        cotangent, at = refs.cotangent_octets[token.octet_rows(channel_group)], token.register_rows(channel_group)
        dt_x_gradients, dt_gradients = (
            (refs.results_by_token[at], refs.dt_gradients_by_token[at]) if state_elements.start else (None, None)
        )
        after: list[tuple[jax.Array, jax.Array]] = []
        for index, (element, log2_decay, (later_cotangent, decay_gradient)) in enumerate(
            zip(state_elements, log2_decays, carry, strict=True)
        ):
            row, product = _write_or_read_row_slice(spec, token, element), _history_rows(token.index, index)
            gradient = later_cotangent + refs.read_in_all_lanes[row] * cotangent
            read_gradient = refs.state_history[_history_rows(token.index + 1, index)] * cotangent
            write_gradient = gradient * dt_x
            if channel_group:
                read_gradient, write_gradient = (
                    read_gradient + refs.dread_by_channel[product],
                    write_gradient + refs.dwrite_by_channel[product],
                )
            refs.dread_by_channel[product], refs.dwrite_by_channel[product] = read_gradient, write_gradient
            dt_x_gradients = _add_or_start(dt_x_gradients, gradient * refs.write_in_all_lanes[row])
            gradient = gradient * jnp.exp2(dt * log2_decay)
            exponent_gradient = gradient * refs.state_history[product]
            dt_gradients = _add_or_start(dt_gradients, exponent_gradient * log2_decay)
            after.append((gradient, decay_gradient + exponent_gradient * dt))
        refs.results_by_token[at], refs.dt_gradients_by_token[at] = dt_x_gradients, dt_gradients
        return tuple(after)

    state_rows = [state_element_rows(spec, channel_group, element) for element in state_elements]
    start = tuple((refs.state[state_row], refs.decay_gradients[state_row]) for state_row in state_rows)
    for state_row, (state, decay_gradient) in zip(
        state_rows, scan_tokens(spec, scan_token_gradients, start, scans_in_reverse=True), strict=True
    ):
        refs.state[state_row], refs.decay_gradients[state_row] = state, decay_gradient


def _add_or_start(total: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if total is None else total + x


def _sum_products_over_rows(refs: ScanRefs, spec: ScanSpec, state_elements: range) -> None:
    """Sums gradients of B and C over the rows of their registers: eight elements of a token become one register."""
    for products, sums in ((refs.dwrite_by_channel, refs.dwrite_by_lane), (refs.dread_by_channel, refs.dread_by_lane)):

        def sum_token_rows(token: jax.Array, carry: jax.Array, products: Any = products, sums: Any = sums) -> jax.Array:
            begin = token * (STATE_ELEMENTS_PER_PASS * SUBLANES)
            total = products[pl.ds(begin, STATE_ELEMENTS_PER_PASS, stride=SUBLANES)]
            for row in range(1, SUBLANES):
                total = total + products[pl.ds(begin + row, STATE_ELEMENTS_PER_PASS, stride=SUBLANES)]
            sums[pl.ds(token * spec.state_size + state_elements.start, len(state_elements))] = total[
                : len(state_elements)
            ]
            return carry

        lax.fori_loop(np.int32(0), np.int32(CHUNK_TOKENS), sum_token_rows, np.int32(0), unroll=spec.unrolled_tokens)


def _sum_lanes(sums: Any, target: Any) -> None:
    """Sums over lanes, [64 * E, 128] to a row [1, 64 * E], by a product with ones that keeps float32's digits."""
    ones = jnp.ones((SUBLANES, LANES), jnp.float32)
    dims = (((1,), (1,)), ((), ()))
    total = lax.dot_general(ones, sums[...], dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    target[...] = total[:1]


def _store_token_gradients(refs: ScanRefs, spec: ScanSpec, grid_step: GridStep, tile: int) -> None:
    """Stores the gradients of a tile's tokens, and adds their contribution to the gradient of `skip`."""
    lanes = lanes_of_tile(tile)
    dt_x_gradients, skip = load_by_token(refs.results_by_token, tile), refs.skip[:, lanes]
    x, dt = load_tokens(refs.x, spec, grid_step, tile), load_tokens(refs.dt, spec, grid_step, tile)
    cotangent = load_tokens(refs.cotangent, spec, grid_step, tile)
    refs.dx[:, lanes] = (dt * dt_x_gradients + skip * cotangent).astype(refs.dx.dtype)
    dt_gradients = load_by_token(refs.dt_gradients_by_token, tile) * LN2 + x * dt_x_gradients
    refs.dstep[:, lanes] = dt_gradients.astype(refs.dstep.dtype)
    refs.dskip[:, lanes] += jnp.sum(x * cotangent, axis=0, keepdims=True)
