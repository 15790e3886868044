"""The forward kernel: chunks of a row in order, states in VMEM between them.

HBM   x, dt          ── double buffer ──►  steps, inputs    dt and dt x of a chunk, a token a register
      B, C           ── double buffer ──►  writes, reads    each number in all lanes
VMEM  state, rates     kept across chunks; in registers over the tokens of a chunk, 16 numbers at a time
HBM   chunk states   ◄─ double buffer ──   the states before the chunk
      output         ◄─ double buffer ──   results + D x
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.selective_scan.kernels.tile import (
    ScanRefs,
    Step,
    Token,
    lane_tiles,
    lanes_of,
    load_numbers,
    load_results,
    load_tile,
    number_at,
    over_tokens,
    spread,
    step_of,
    store_numbers,
    store_tokens,
)
from ejkernel_pallas.tpu.selective_scan.spec import ScanSpec

NUMBERS_PER_PASS = 16
"""Numbers of a state in registers at a time, and their rates: half of the 64 registers."""


def selective_scan_fwd(refs: ScanRefs, *, spec: ScanSpec) -> None:
    """Computes the outputs of one chunk."""
    step = step_of(refs, spec)

    @pl.when(step.first)
    def _() -> None:
        store_numbers(spec, step, refs.initial, refs.state)
        store_numbers(spec, step, refs.decay, refs.rates)

    @pl.when(step.real)
    def _() -> None:
        _chunk(refs, spec, step)

    @pl.when(step.last)
    def _() -> None:
        load_numbers(spec, refs.state, refs.final)


def _chunk(refs: ScanRefs, spec: ScanSpec, step: Step) -> None:
    """Computes a chunk."""
    load_numbers(spec, refs.state, refs.chunk_states)
    spread(spec, refs.write, refs.writes)
    spread(spec, refs.read, refs.reads)
    for tile in lane_tiles(spec):
        steps = load_tile(refs.step, spec, step, tile)
        store_tokens(refs.steps, tile, steps)
        store_tokens(refs.inputs, tile, steps * load_tile(refs.x, spec, step, tile))
    for group in range(spec.groups):
        for first in range(0, spec.size, NUMBERS_PER_PASS):
            _scan(refs, spec, group, range(first, min(first + NUMBERS_PER_PASS, spec.size)))
    for tile in lane_tiles(spec):
        x = refs.x[:, lanes_of(tile)].astype(jnp.float32)
        output = load_results(refs.results, tile) + refs.skip[:, lanes_of(tile)] * x
        refs.output[:, lanes_of(tile)] = output.astype(refs.output.dtype)


def _scan(refs: ScanRefs, spec: ScanSpec, group: int, numbers: range) -> None:
    """Scans some numbers of the states of a group. The first numbers store the group's results; later numbers add to
    them.
    """
    rates = [refs.rates[number_at(spec, group, number)] for number in numbers]

    def one(token: Token, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        steps, inputs = refs.steps[token.strided(group)], refs.inputs[token.strided(group)]
        total = refs.results[token.whole(group)] if numbers.start else None
        after: list[jax.Array] = []
        for number, rate, state in zip(numbers, rates, states, strict=True):
            row = pl.ds(token.number * spec.size + number, 1)
            state = jnp.exp2(steps * rate) * state + inputs * refs.writes[row]
            read = state * refs.reads[row]
            total = read if total is None else total + read
            after.append(state)
        refs.results[token.whole(group)] = total
        return tuple(after)

    states = tuple(refs.state[number_at(spec, group, number)] for number in numbers)
    for number, state in zip(numbers, over_tokens(spec, one, states), strict=True):
        refs.state[number_at(spec, group, number)] = state
