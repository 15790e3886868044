"""The decode step of linear recurrences on a GPU: one to eight tokens per sequence, against XLA, FLA and a copy.

    python benchmarks/linear_recurrence/recurrent_step_gpu.py  # the table
    python benchmarks/linear_recurrence/recurrent_step_gpu.py --quick  # one token
    python benchmarks/linear_recurrence/recurrent_step_gpu.py --only triton  # one of ours
    # one to eight tokens of 64 to 256 sequences, without XLA; steps are compiled by 8 threads before
    python benchmarks/linear_recurrence/recurrent_step_gpu.py --serving --threads 8
    python benchmarks/linear_recurrence/recurrent_step_gpu.py --candidates  # also every configuration worth measuring
    # no times: small steps anywhere
    TRITON_INTERPRET=1 python benchmarks/linear_recurrence/recurrent_step_gpu.py --check

All sides get the same bfloat16 tokens and states in float32. A side is timed only if its output and states agree with
the formula's, token by token in float32. A sample is a compiled loop of 16 steps whose state is donated, so that
starting them costs little; PyTorch starts each. Sides are interleaved, and medians of a step are printed. "Slots" are
twice as many as there are sequences, whose slots are drawn at random. The rate counts the sequences' states once read
and once written; so does that of the copy, which negates as many in place. Mamba-2's states are transposed, as
`state_space_v2` has them.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops.device import current_device

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence.linear_recurrence_gpu import Cell, implementation
from selective_scan.selective_scan_gpu import Side, medians

COLUMNS = ("shape", "side", "microseconds", "rate", "share of the copy")
STEPS = 16
FORMS = ("", "packed", "slots")
KINDS = ("gate a head", "gla", "lightning", "mamba-2", "gated delta", "kda")

Call = Callable[[LinearRecurrence], tuple[jax.Array, jax.Array]]


def steps(options: argparse.Namespace) -> Iterator[tuple[Cell, str]]:
    """What is measured, and where the states are: of rows, of packed sequences or in slots.

    The length of a cell is that of a step.
    """
    kinds = [kind for kind in KINDS if options.kind in ("", kind)]
    if options.check:
        for kind in kinds:
            for form in FORMS:
                yield Cell(kind=kind, batch=2, length=3, heads=2, keys=16, values=24), form
        return
    for kind in kinds:
        for form in FORMS:
            if form != "packed" or kind == "gated delta":
                yield Cell(kind=kind, batch=256, length=1), form
    if options.quick:
        return
    sizes = ((1, 1, ""), (32, 1, ""), (256, 2, ""), (256, 4, ""), (256, 8, ""), (32, 8, "slots"))
    for kind in kinds:
        for batch, tokens, form in sizes:
            yield Cell(kind=kind, batch=batch, length=tokens), form


def serving_steps(options: argparse.Namespace) -> Iterator[tuple[Cell, str]]:
    """One to eight tokens of sequences as they are served together."""
    for kind in KINDS:
        for batch, form in ((256, ""), (256, "slots"), (128, ""), (64, "")):
            for tokens in (1, 2, 4, 8) if batch == 256 and not form else (1, 8):
                if options.kind in ("", kind):
                    yield Cell(kind=kind, batch=batch, length=tokens), form


def record_of(cell: Cell, form: str) -> LinearRecurrence:
    """A step with states."""
    record, sequences = cell.record(), cell.batch * (2 if form == "slots" else 1)
    transposed = cell.kind == "mamba-2"
    sizes = (cell.values, cell.keys) if transposed else (cell.keys, cell.values)
    state = jax.random.normal(jax.random.key(9), (sequences, cell.heads, *sizes), jnp.float32)
    record = dataclasses.replace(record, transposed_states=transposed)
    if not form:
        return dataclasses.replace(record, initial_state=state)
    arrays = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    flat = {
        name: x.reshape(1, -1, *x.shape[2:])
        for name, x in arrays.items()
        if isinstance(x, jax.Array) and x.shape[:2] == record.query.shape[:2]
    }
    bounds = jnp.arange(cell.batch + 1, dtype=jnp.int32) * cell.length
    slots = jax.random.permutation(jax.random.key(8), sequences)[: cell.batch].astype(jnp.int32)
    held = {"cu_seqlens": bounds, "sequence_state": state, "state_slots": slots if form == "slots" else None}
    return dataclasses.replace(record, **flat, **held)


def chained(call: Call, record: LinearRecurrence) -> Side:
    """A loop of steps, each of which continues the state of the one before; the first one's is donated."""
    field = "initial_state" if record.cu_seqlens is None else "sequence_state"

    def loop(state: jax.Array, record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
        def step(_: Any, held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return call(dataclasses.replace(record, **{field: held[1]}))

        empty = jnp.zeros((*record.query.shape[:2], *record.value.shape[2:]), record.query.dtype)
        return jax.lax.fori_loop(0, STEPS, step, (empty, state))

    state, tokens = jnp.copy(getattr(record, field)), dataclasses.replace(record, **{field: None})
    program = jax.jit(loop, donate_argnums=0).lower(state, tokens).compile()
    held = [state]

    def run() -> jax.Array:
        output, held[0] = program(held[0], tokens)
        return output

    return Side(run)


def copy(record: LinearRecurrence) -> Side:
    """As many states, negated where they are, as often."""
    state = record.initial_state if record.cu_seqlens is None else record.sequence_state
    assert state is not None
    state = state if record.state_slots is None else state[: record.state_slots.shape[0]]

    def loop(state: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, x: -x, state)

    held = [jnp.copy(state)]
    program = jax.jit(loop, donate_argnums=0).lower(state).compile()

    def run() -> jax.Array:
        held[0] = program(held[0])
        return held[0]

    return Side(run)


def calls(record: LinearRecurrence, options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    """Everything of ours that can take a step."""
    for name in ("cuda", "triton_decode", "xla"):
        if options.only not in name or (options.serving and name == "xla"):
            continue
        chosen = implementation(name)
        absent = chosen.platform == "cuda" and current_device().vendor != "nvidia"
        if absent or any(chosen.requires.extra(record)):
            continue
        configs = [chosen.config.heuristic(record, current_device(), "forward")]
        if options.candidates and name == "triton_decode":
            configs += chosen.config.candidates(record, current_device(), "forward")
        for n, config in enumerate(configs):

            def call(record: LinearRecurrence, chosen: Any = chosen, config: Any = config) -> Any:
                return chosen.function("forward")(record, config)[0]

            yield (name if n == 0 else f"{name} {config}"), call


def fla(cell: Cell, record: LinearRecurrence) -> Iterator[tuple[str, Side, Any]]:
    """flash-linear-attention's steps, where it is installed, with what the first one makes."""
    if record.cu_seqlens is not None or not (importlib.util.find_spec("torch") and importlib.util.find_spec("fla")):
        return
    try:
        import torch

        step = _fla_step(cell.kind, record)
        if step is None:
            return
        held = [torch.from_dlpack(record.initial_state).clone()]
        first = step(held[0].clone())

        def run() -> Any:
            for _ in range(STEPS):
                _, held[0] = step(held[0])
            torch.cuda.synchronize()
            return ()

        yield "FLA", Side(run), [jnp.asarray(x.float().cpu().numpy()) for x in first]
    except Exception as failure:  # noqa: BLE001  whatever another library fails with is its result
        print(f"<!-- FLA on {cell}: {type(failure).__name__}: {str(failure)[:200]} -->", flush=True)


def _fla_step(kind: str, record: LinearRecurrence) -> Callable[[Any], Any] | None:
    import torch

    names = ("query", "key", "value", "decay", "beta")
    q, k, v, g, beta = (None if getattr(record, n) is None else torch.from_dlpack(getattr(record, n)) for n in names)
    options = {"scale": record.softmax_scale, "output_final_state": True}
    if kind == "gla":
        from fla.ops.gla import fused_recurrent_gla

        return lambda state: fused_recurrent_gla(q, k, v, g, initial_state=state, **options)[:2]
    if kind == "gate a head":
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        return lambda state: fused_recurrent_simple_gla(q, k, v, g[..., 0], initial_state=state, **options)[:2]
    if kind == "gated delta":
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        gate = g[..., 0].contiguous()
        return lambda state: fused_recurrent_gated_delta_rule(
            q, k, v, g=gate, beta=beta, initial_state=state, **options
        )[:2]
    if kind == "kda":
        from fla.ops.kda import fused_recurrent_kda

        return lambda state: fused_recurrent_kda(q, k, v, g, beta, initial_state=state, **options)[:2]
    return None


@jax.jit
def distance(made: Any, want: Any) -> jax.Array:
    """The largest relative error of several arrays."""
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(made, want, strict=True)]
    return jnp.max(jnp.stack([jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel()) for x, y in pairs]))


def right(name: str, made: Any, want: Any, cell: Cell) -> bool:
    """Whether outputs and states are those of the formula; says so if not."""
    off = float(distance(tuple(made), tuple(want)))
    if not off < 1e-2:
        print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
    return off < 1e-2


def prepared(step: tuple[Cell, str], options: argparse.Namespace) -> dict[str, Side]:
    """Everything that takes a step rightly, compiled, and the copy."""
    cell, form = step
    record = record_of(cell, form)
    want = jax.jit(lambda record: reference(record)[0])(record)
    contenders: dict[str, Side] = {}
    for name, call in calls(record, options):
        if right(name, jax.jit(call)(record), want, cell):
            contenders[name] = chained(call, record)
    for name, side, made in fla(cell, record):
        if right(name, made, want, cell):
            contenders[name] = side
    return {**contenders, "copy": copy(record)}


def timed(step: tuple[Cell, str], contenders: dict[str, Side], options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side."""
    cell, form = step
    shape = f"{cell}, {form}" if form else str(cell)
    if options.check:
        for name, side in contenders.items():
            jax.block_until_ready(side.run())
            yield [shape, name, "right", "", ""]
        return
    states = 8.0 * cell.batch * cell.heads * cell.keys * cell.values
    tokens = token_bytes(record_of(cell, form))
    measured = medians(contenders, options.rounds)
    for name, seconds in measured.items():
        share = measured["copy"] / seconds
        shares = "" if name == "copy" else f"{share:.3f} ({share * (states + tokens) / states:.3f})"
        yield [shape, name, f"{seconds / STEPS * 1e6:.1f}", f"{states * STEPS / seconds / 1e9:.0f} GB/s", shares]


def token_bytes(record: LinearRecurrence) -> int:
    """The bytes of a step's tokens and of its output, which has a head for each state."""
    read = (record.query, record.key, record.value, record.decay, record.beta, record.dt)
    state = record.initial_state if record.cu_seqlens is None else record.sequence_state
    assert state is not None
    written = record.value.nbytes // record.value.shape[2] * state.shape[1]
    return sum(x.nbytes for x in read if x is not None) + written


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """The lines of the table. With several threads everything is compiled before anything is timed."""
    prepare = functools.partial(prepared, options=options)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        every = list(serving_steps(options) if options.serving else steps(options))
        made = map(prepare, every) if options.threads == 1 else list(pool.map(prepare, every))
        for step, contenders in zip(every, made, strict=True):
            yield from timed(step, contenders, options)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one token")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side")
    parser.add_argument("--threads", type=int, default=1, help="steps compiled at the same time, before all timing")
    parser.add_argument("--candidates", action="store_true", help="every configuration, too")
    parser.add_argument("--kind", default="", choices=("", *KINDS), help="one kind of recurrence; without it all")
    parser.add_argument("--only", default="", help="part of the name of one of ours; without it all")
    parser.add_argument("--serving", action="store_true", help="one to eight tokens, 64 to 256 sequences, no XLA")
    parser.add_argument("--check", action="store_true", help="small steps on any device, no times")
    options = parser.parse_args()
    if not options.check and not shared.report.has_gpu():
        return
    shared.report.print_rows_as_measured(COLUMNS, rows(options))


if __name__ == "__main__":
    main()
