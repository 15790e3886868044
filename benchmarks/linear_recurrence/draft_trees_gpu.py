"""Trees of draft tokens in recurrences on a GPU: storing all states, or none and processing accepted tokens again.

    python benchmarks/linear_recurrence/draft_trees_gpu.py  # the table
    python benchmarks/linear_recurrence/draft_trees_gpu.py --quick  # one kind
    # no times: small trees anywhere
    TRITON_INTERPRET=1 python benchmarks/linear_recurrence/draft_trees_gpu.py --check

256 requests have the same tree of eight draft tokens, and states in slots drawn at random. "States" keeps the state
after every token, and accepting gathers one for each request. "Outputs" stores none, and accepting processes four
tokens of each request again. A side is timed only if its outputs, and the states that it stores, agree with the formula
in float32. Sides are interleaved in loops of eight steps; medians of a step are printed.
"""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.modules import ragged
from ejkernel.ops.device import current_device

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence.linear_recurrence_gpu import Cell, implementation
from linear_recurrence.recurrent_step_gpu import record_of

COLUMNS = ("kind", "tree", "side", "verify us", "verify and accept us")
TREES = {
    "a chain": ((-1, 0, 1, 2, 3, 4, 5, 6), 3),
    "two branches": ((-1, 0, 1, 2, 3, 1, 5, 6), 4),
    "five branches": ((-1, 0, 0, 0, 1, 1, 4, 6), 7),
}
"""Parents, and the newest accepted token, whose path has four tokens or more."""

STEPS = 8
KINDS = ("gated delta", "kda", "mamba-2")
Call = Callable[[LinearRecurrence], tuple[jax.Array, jax.Array]]


def tree_record(kind: str, tree: str, check: bool) -> LinearRecurrence:
    """Returns requests with their states in slots and a tree each."""
    parents, _ = TREES[tree]
    cell = Cell(kind=kind, batch=256, length=len(parents))
    if check:
        cell = dataclasses.replace(cell, batch=2, heads=2, keys=16, values=24)
    return dataclasses.replace(record_of(cell, "slots"), parents=jnp.tile(jnp.array(parents), cell.batch)[None])


def step_of(name: str) -> Call:
    """Returns an implementation as a function of a record."""
    chosen = implementation(name)

    def call(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
        config = chosen.config.heuristic(record, current_device(), "forward") if chosen.config else None
        return chosen.function("forward")(record, config)[0]

    return call


def paths_of(record: LinearRecurrence, accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the accepted tokens, and their cumulative lengths."""
    return ragged.accepted_tokens(jnp.asarray(record.parents)[0], accepted, jnp.asarray(record.cu_seqlens))


def without_trees(record: LinearRecurrence, tokens: jax.Array, lengths: jax.Array) -> LinearRecurrence:
    """Returns the record of the listed tokens alone, which continue each other."""
    arrays = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    taken = {
        name: x[:, tokens]
        for name, x in arrays.items()
        if isinstance(x, jax.Array) and x.ndim > 2 and x.shape[:2] == record.query.shape[:2]
    }
    return dataclasses.replace(record, **taken, parents=None, keeps_token_states=True, cu_seqlens=lengths)


def verify_and_accept(
    call: Call, record: LinearRecurrence, accepted: jax.Array | None, paths: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs, and the slots after the accepted tokens, if any are."""
    output, states = call(record)
    stored, bounds, slots = (jnp.asarray(x) for x in (record.sequence_state, record.cu_seqlens, record.state_slots))
    if accepted is None:
        return output, stored
    if record.keeps_token_states:
        return output, ragged.accept_states(stored, states[0], accepted, bounds, slots)
    return output, call(without_trees(record, *paths))[1]


def looped(call: Call, record: LinearRecurrence, accepted: jax.Array, accepts: bool) -> Callable[[], Any]:
    """Returns a loop of steps over slots that are donated."""

    def loop(slots: jax.Array, record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
        paths = paths_of(record, accepted)

        def step(_: Any, held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            current = dataclasses.replace(record, sequence_state=held[0])
            output, slots = verify_and_accept(call, current, accepted if accepts else None, paths)
            return slots, output

        empty = jnp.zeros((*record.query.shape[:2], *record.value.shape[2:]), record.query.dtype)
        return jax.lax.fori_loop(0, STEPS, step, (slots, empty))

    held = [jnp.copy(jnp.asarray(record.sequence_state))]
    tokens = dataclasses.replace(record, sequence_state=None)
    program = jax.jit(loop, donate_argnums=0).lower(held[0], tokens).compile()

    def run() -> jax.Array:
        held[0], output = program(held[0], tokens)
        return output

    return run


def sides(record: LinearRecurrence) -> Iterator[tuple[str, str, bool]]:
    """Yields the sides: name, implementation, and whether it keeps the states of tokens."""
    yield "states, triton_decode", "triton_decode", True
    yield "outputs, triton_decode", "triton_decode", False
    outputs_alone = dataclasses.replace(record, keeps_token_states=False)
    if current_device().vendor == "nvidia" and not any(implementation("cuda").requires.extra(outputs_alone)):
        yield "outputs, cuda", "cuda", False


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the norm of the difference in units of that of `want`, of finite numbers."""
    got, want = (jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) for x in (got, want))
    return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())


def is_right(call: Call, record: LinearRecurrence, accepted: jax.Array) -> bool:
    """Returns whether outputs and accepted states are those of the formula."""
    paths = paths_of(record, accepted)
    output, slots = jax.jit(functools.partial(verify_and_accept, call))(record, accepted, paths)
    want = jax.jit(lambda record: reference(record)[0])
    outputs_alone = dataclasses.replace(record, keeps_token_states=False)
    errors = (
        relative_error(output, want(outputs_alone)[0]),
        relative_error(slots, want(without_trees(record, *paths))[1]),
    )
    return max(float(error) for error in errors) < 1e-2


def rows(check: bool, kinds: tuple[str, ...]) -> Iterator[list[str]]:
    """Yields the lines of the table."""
    for kind in kinds:
        for tree, (_, newest) in TREES.items():
            record = tree_record(kind, tree, check)
            accepted = jnp.full(jnp.asarray(record.state_slots).shape[0], newest)
            programs: dict[tuple[str, bool], Callable[[], Any]] = {}
            for name, implementation_name, keeps in sides(record):
                call, of_side = step_of(implementation_name), dataclasses.replace(record, keeps_token_states=keeps)
                right = is_right(call, of_side, accepted)
                if check or not right:
                    yield [kind, tree, name, "right" if right else "wrong", ""]
                    continue
                for accepts in (False, True):
                    programs[name, accepts] = looped(call, of_side, accepted, accepts)
            yield from timed(kind, tree, programs)


def timed(kind: str, tree: str, programs: dict[tuple[str, bool], Callable[[], Any]]) -> Iterator[list[str]]:
    """Yields one line for each side."""
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in programs}
    for _ in range(4):
        for key, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[key].append((time.perf_counter() - start) / STEPS * 1e6)
    for name in dict.fromkeys(name for name, _ in programs):
        verify, accept = (f"{statistics.median(times[name, accepts][1:]):.0f}" for accepts in (False, True))
        yield [kind, tree, name, verify, accept]


def main() -> None:
    """Prints the table."""
    flags = {"--quick": "one kind", "--check": "small trees on any device, no times"}
    options = shared.report.parse_options(__doc__, flags)
    shared.report.print_rows_as_measured(COLUMNS, rows(options.check, KINDS[:1] if options.quick else KINDS))


if __name__ == "__main__":
    main()
