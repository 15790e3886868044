"""The backward kernel: chunks of a row in reverse, the states' cotangents in VMEM between them.

    HBM   x, dt, cotangent ─ double buffer ─►  steps, inputs, cotangents
          chunk states     ─ double buffer ─►  rates, and the state before the chunk
    VMEM  history    forwards:  the state before and after every token, eight numbers at a time
          state      backwards: the cotangent of the state after a token, in registers over the tokens of a chunk
          products   of every token and number, 1024 channels each: the gradients of B and C
    HBM   dx, dt's gradient ◄─ double buffer ─  results, of_steps
          dB, dC            ◄─ double buffer ─  products, summed over rows and then over lanes
          dA, dD            ◄─ once a row ───   sums over tokens

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

from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
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
from ejkernel_pallas.tpu.selective_scan.plan import LOG2E
from ejkernel_pallas.tpu.selective_scan.spec import CHUNK, ScanSpec

NUMBERS_PER_PASS = 8
"""Numbers of a state at a time: their history takes 2 MiB, and their sums fit registers."""
LN2 = 1 / LOG2E


def selective_scan_bwd(refs: ScanRefs, *, spec: ScanSpec) -> None:
    """Computes the gradients of one chunk."""
    step = step_of(refs, spec, backwards=True)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        store_numbers(spec, step, refs.decay, refs.rates)
        refs.rate_gradients[...] = jnp.zeros_like(refs.rate_gradients)
        refs.dskip[...] = jnp.zeros_like(refs.dskip)

    @pl.when(step.last)
    def _() -> None:
        store_numbers(spec, step, refs.final, refs.state)

    @pl.when(step.real)
    def _() -> None:
        _chunk(refs, spec, step)

    @pl.when(jnp.logical_not(step.real))
    def _() -> None:
        refs.dwrite[...] = jnp.zeros_like(refs.dwrite)
        refs.dread[...] = jnp.zeros_like(refs.dread)

    @pl.when(step.first)
    def _() -> None:
        load_numbers(spec, refs.state, refs.dinitial)

    @pl.when(pl.program_id(2) == spec.chunks - 1)
    def _() -> None:
        load_numbers(spec, refs.rate_gradients, refs.ddecay)


def _chunk(refs: ScanRefs, spec: ScanSpec, step: Step) -> None:
    """Computes a chunk."""
    spread(spec, refs.write, refs.writes)
    spread(spec, refs.read, refs.reads)
    store_numbers(spec, step, refs.chunk_states, refs.before)
    for tile in lane_tiles(spec):
        steps = load_tile(refs.step, spec, step, tile)
        store_tokens(refs.steps, tile, steps)
        store_tokens(refs.inputs, tile, steps * load_tile(refs.x, spec, step, tile))
        store_tokens(refs.cotangents, tile, load_tile(refs.cotangent, spec, step, tile))
    for first in range(0, spec.size, NUMBERS_PER_PASS):
        numbers = range(first, min(first + NUMBERS_PER_PASS, spec.size))
        for group in range(spec.groups):
            _recompute(refs, spec, group, numbers)
            _reverse(refs, spec, group, numbers)
        _sum_rows(refs, spec, numbers)
    _sum_lanes(refs.write_gradients, refs.dwrite)
    _sum_lanes(refs.read_gradients, refs.dread)
    for tile in lane_tiles(spec):
        _store(refs, spec, step, tile)


def _history(token: Any, index: int) -> Any:
    """Returns where the state before a token lies in scratch memory."""
    return pl.ds(pl.multiple_of((token * NUMBERS_PER_PASS + index) * SUBLANES, SUBLANES), SUBLANES)


def _row(spec: ScanSpec, token: Token, number: int) -> Any:
    """Returns where B or C of a token and a state number lies."""
    return pl.ds(token.number * spec.size + number, 1)


def _recompute(refs: ScanRefs, spec: ScanSpec, group: int, numbers: range) -> None:
    """Stores the states of some numbers before every token, and after the last."""
    rates = [refs.rates[number_at(spec, group, number)] for number in numbers]

    def one(token: Token, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        steps, inputs = refs.steps[token.strided(group)], refs.inputs[token.strided(group)]
        after: list[jax.Array] = []
        for index, (number, rate, state) in enumerate(zip(numbers, rates, states, strict=True)):
            state = jnp.exp2(steps * rate) * state + inputs * refs.writes[_row(spec, token, number)]
            refs.history[_history(token.number + 1, index)] = state
            after.append(state)
        return tuple(after)

    states = tuple(refs.before[number_at(spec, group, number)] for number in numbers)
    for index, state in enumerate(states):
        refs.history[_history(0, index)] = state
    over_tokens(spec, one, states)


def _reverse(refs: ScanRefs, spec: ScanSpec, group: int, numbers: range) -> None:
    """Adds the gradients by way of some numbers of a group's states."""
    rates = [refs.rates[number_at(spec, group, number)] for number in numbers]

    def one(token: Token, carry: tuple[tuple[jax.Array, jax.Array], ...]) -> Any:
        steps, inputs = refs.steps[token.strided(group)], refs.inputs[token.strided(group)]
        cotangent, at = refs.cotangents[token.strided(group)], token.whole(group)
        input_gradients, step_gradients = (refs.results[at], refs.step_gradients[at]) if numbers.start else (None, None)
        after: list[tuple[jax.Array, jax.Array]] = []
        for index, (number, rate, (later, rate_gradient)) in enumerate(zip(numbers, rates, carry, strict=True)):
            row, product = _row(spec, token, number), _history(token.number, index)
            gradient = later + refs.reads[row] * cotangent
            read_gradient = refs.history[_history(token.number + 1, index)] * cotangent
            write_gradient = gradient * inputs
            if group:
                read_gradient, write_gradient = (
                    read_gradient + refs.read_products[product],
                    write_gradient + refs.products[product],
                )
            refs.read_products[product], refs.products[product] = read_gradient, write_gradient
            input_gradients = _add(input_gradients, gradient * refs.writes[row])
            gradient = gradient * jnp.exp2(steps * rate)
            exponent_gradient = gradient * refs.history[product]
            step_gradients = _add(step_gradients, exponent_gradient * rate)
            after.append((gradient, rate_gradient + exponent_gradient * steps))
        refs.results[at], refs.step_gradients[at] = input_gradients, step_gradients
        return tuple(after)

    token_rows = [number_at(spec, group, number) for number in numbers]
    start = tuple((refs.state[token_row], refs.rate_gradients[token_row]) for token_row in token_rows)
    for token_row, (state, rate_gradient) in zip(
        token_rows, over_tokens(spec, one, start, backwards=True), strict=True
    ):
        refs.state[token_row], refs.rate_gradients[token_row] = state, rate_gradient


def _add(total: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if total is None else total + x


def _sum_rows(refs: ScanRefs, spec: ScanSpec, numbers: range) -> None:
    """Sums products over the rows of their registers: eight numbers of a token become one register."""
    for products, sums in ((refs.products, refs.write_gradients), (refs.read_products, refs.read_gradients)):

        def one(token: jax.Array, carry: jax.Array, products: Any = products, sums: Any = sums) -> jax.Array:
            begin = token * (NUMBERS_PER_PASS * SUBLANES)
            total = products[pl.ds(begin, NUMBERS_PER_PASS, stride=SUBLANES)]
            for row in range(1, SUBLANES):
                total = total + products[pl.ds(begin + row, NUMBERS_PER_PASS, stride=SUBLANES)]
            sums[pl.ds(token * spec.size + numbers.start, len(numbers))] = total[: len(numbers)]
            return carry

        lax.fori_loop(np.int32(0), np.int32(CHUNK), one, np.int32(0), unroll=spec.unroll)


def _sum_lanes(sums: Any, target: Any) -> None:
    """Sums over lanes, [64 * E, 128] to a row [1, 64 * E], by a product with ones that keeps float32's digits."""
    ones = jnp.ones((SUBLANES, LANES), jnp.float32)
    dims = (((1,), (1,)), ((), ()))
    total = lax.dot_general(ones, sums[...], dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    target[...] = total[:1]


def _store(refs: ScanRefs, spec: ScanSpec, step: Step, tile: int) -> None:
    """Stores the gradients of a tile's tokens, and adds their contribution to the gradient of `skip`."""
    lanes = lanes_of(tile)
    input_gradients, skip = load_results(refs.results, tile), refs.skip[:, lanes]
    x, steps = load_tile(refs.x, spec, step, tile), load_tile(refs.step, spec, step, tile)
    cotangent = load_tile(refs.cotangent, spec, step, tile)
    refs.dx[:, lanes] = (steps * input_gradients + skip * cotangent).astype(refs.dx.dtype)
    step_gradients = load_results(refs.step_gradients, tile) * LN2 + x * input_gradients
    refs.dstep[:, lanes] = step_gradients.astype(refs.dstep.dtype)
    refs.dskip[:, lanes] += jnp.sum(x * cotangent, axis=0, keepdims=True)
