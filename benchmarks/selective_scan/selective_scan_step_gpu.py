"""The decode step of the selective scan (Mamba-1) on a GPU: states of rows and in slots, beside XLA and a copy.

    python benchmarks/selective_scan/selective_scan_step_gpu.py
    python benchmarks/selective_scan/selective_scan_step_gpu.py --candidates  # also every configuration worth measuring

All sides get the same bfloat16 tokens and states in float32, 4096 channels of 16 numbers. A side is timed only if its
output and states agree with the formula's on 8 sequences. A sample is a compiled loop of 16 steps whose state is
donated. Sides are interleaved, and medians of a step are printed. Slots are twice as many as there are sequences,
whose slots are drawn by chance. The rate counts states once read and once written, and the tokens; that of the copy
what it reads and writes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan import SelectiveScan, reference
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence.recurrent_step_gpu import distance
from selective_scan.selective_scan_gpu import Side, medians

COLUMNS = ("shape", "side", "microseconds", "rate")
STEPS, SEQUENCES, CHANNELS, NUMBERS = 16, 256, 4096, 16
Step = Callable[[SelectiveScan], tuple[jax.Array, jax.Array]]


def record_of(sequences: int, tokens: int, slots: bool) -> SelectiveScan:
    """A step with states."""
    keys = iter(jax.random.split(jax.random.key(0), 7))
    rows = (1, sequences * tokens) if slots else (sequences, tokens)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    held = 2 * sequences if slots else sequences
    record = SelectiveScan(
        x=normal(*rows, CHANNELS),
        step=jax.nn.softplus(normal(*rows, CHANNELS) - 1),
        decay=-jnp.exp(normal(CHANNELS, NUMBERS).astype(jnp.float32) / 2),
        write=normal(*rows, NUMBERS),
        read=normal(*rows, NUMBERS),
        skip=jnp.ones(CHANNELS),
        initial_state=jax.random.normal(next(keys), (held, CHANNELS, NUMBERS)),
    )
    if not slots:
        return record
    bounds = jnp.arange(sequences + 1, dtype=jnp.int32) * tokens
    indices = jax.random.permutation(next(keys), held)[:sequences].astype(jnp.int32)
    return dataclasses.replace(record, cu_seqlens=bounds, state_slots=indices)


def chained(call: Step, record: SelectiveScan) -> Side:
    """A loop of steps, each of which continues the state of the one before; the first one's is donated."""

    def loop(state: Any, record: SelectiveScan) -> Any:
        def step(_: Any, held: Any) -> Any:
            return call(dataclasses.replace(record, initial_state=held[1]))

        return jax.lax.fori_loop(0, STEPS, step, (jnp.zeros_like(record.x), state))

    state, tokens = record.initial_state, dataclasses.replace(record, initial_state=None)
    assert state is not None
    held = [jnp.copy(state)]
    program = jax.jit(loop, donate_argnums=0).lower(held[0], tokens).compile()

    def run() -> jax.Array:
        output, held[0] = program(held[0], tokens)
        return output

    return Side(run)


def copy() -> Side:
    """As many states, negated where they are, as often."""
    held = [jax.random.normal(jax.random.key(1), (SEQUENCES, CHANNELS, NUMBERS))]
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, STEPS, lambda _, x: -x, x), donate_argnums=0)
    program = loop.lower(held[0]).compile()

    def run() -> jax.Array:
        held[0] = program(held[0])
        return held[0]

    return Side(run)


def calls(record: SelectiveScan, candidates: bool) -> Iterator[tuple[str, Step]]:
    """Everything of ours that takes a step."""
    for name in ("triton_decode", "xla"):
        (chosen,) = (i for i in registry().implementations["state_space_v1"] if i.name == name)
        configs = [chosen.config.heuristic(record, current_device(), "forward")]
        if candidates and name == "triton_decode":
            configs += chosen.config.candidates(record, current_device(), "forward")
        for n, config in enumerate(configs):
            label = name if n == 0 else f"{name} {config}"
            yield label, lambda r, chosen=chosen, config=config: chosen.function("forward")(r, config)[0]


def timed(tokens: int, slots: bool, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side that is right."""
    record, small = record_of(SEQUENCES, tokens, slots), record_of(8, tokens, slots)
    want = jax.jit(lambda record: reference(record)[0])(small)
    sides: dict[str, Side] = {"copy": copy()}
    for name, call in calls(record, options.candidates):
        if name == "xla" and slots and not options.slow:
            continue
        off = float(distance(tuple(jax.jit(call)(small)), tuple(want)))
        if not off < 1e-2:
            print(f"<!-- {name} is wrong: relative error {off:.2g} -->", flush=True)
            continue
        sides[name] = chained(call, record)
    states = 8.0 * SEQUENCES * CHANNELS * NUMBERS
    total = states + 2.0 * SEQUENCES * tokens * (3 * CHANNELS + 2 * NUMBERS)
    shape = f"B{SEQUENCES} S{tokens} E{CHANNELS} N{NUMBERS}{', slots' if slots else ''}"
    for name, seconds in medians(sides, options.rounds).items():
        rate = (states if name == "copy" else total) * STEPS / seconds / 1e9
        yield [shape, name, f"{seconds / STEPS * 1e6:.1f}", f"{rate:.0f} GB/s"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side")
    parser.add_argument("--candidates", action="store_true", help="every configuration, too")
    parser.add_argument("--slow", action="store_true", help="XLA with slots too, which adds 33 tokens a sequence")
    options = parser.parse_args()
    if shared.report.has_gpu():
        steps = ((1, True), (1, False), (4, True))
        shared.report.print_rows_as_measured(COLUMNS, (row for step in steps for row in timed(*step, options)))


if __name__ == "__main__":
    main()
