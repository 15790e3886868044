"""Linear recurrences on a GPU: gated linear attention, lightning, gates per head, Mamba-2, delta rules, long rows.

    python benchmarks/linear_recurrence/linear_recurrence_gpu.py  # the table
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --quick  # no long rows
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --long  # long rows, and packed documents
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --heads  # shared heads, 256 value channels
    # the second of four processes that compile at the same time and measure in turn (EJKERNEL_BENCH_LOCK names a file)
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --part 2/4 --meet /tmp/parts
    # also every configuration worth measuring
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --candidates
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --stages  # the kernels one by one, with many tiles

All sides get the same bfloat16 arrays. A side is timed only if its output and gradients agree with the formula's, token
by token in float32, on the first tokens of one row. Sides are interleaved, several calls per sample, and
medians are printed. Memory is what a compiled function needs in addition to its arguments; PyTorch's is the most that
it had allocated at a time.
"""

import argparse
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
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.selection import Request
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence import _recurrence_peers
from linear_recurrence._recurrence_cells import Cell, cells, head_cells

COLUMNS = ("shape", "side", "forward ms", "with gradients ms", "memory with gradients MB")
Side = Callable[[], Any]
CHECKED = 512
"""Tokens that are compared with the formula."""


def serving(record: LinearRecurrence) -> str:
    """The name of the Triton implementation for a record."""
    return "triton" if record.beta is None else "triton_delta"


def implementation(name: str) -> Any:
    """The family's implementation of that name."""
    return next(i for i in registry().implementations["gated_linear_attention"] if i.name == name)


def with_gradients(call: Callable[[Any], Any], grad_fields: frozenset[str]) -> Callable[[LinearRecurrence, Any], Any]:
    """(record, cotangents) -> outputs and gradients."""

    def both(record: LinearRecurrence, cotangent: Any) -> Any:
        output, pull = jax.vjp(
            lambda fields: call(dataclasses.replace(record, **fields)), fields_of(record, grad_fields)
        )
        return output, pull(cotangent)[0]

    return both


def passes(call: Callable[[Any], Any], record: LinearRecurrence, grad_fields: frozenset[str]) -> tuple[Any, Any]:
    """Both compiled: record -> outputs, and (record, cotangents) -> outputs and gradients."""
    output = jax.eval_shape(call, record)
    both = jax.jit(with_gradients(call, grad_fields))
    return jax.jit(call).lower(record).compile(), both.lower(record, output).compile()


def fields_of(record: LinearRecurrence, grad_fields: frozenset[str]) -> dict[str, jax.Array]:
    """The fields by name."""
    return {name: getattr(record, name) for name in sorted(grad_fields)}


def kernel(name: str, config: Any) -> Callable[[LinearRecurrence], Any]:
    """An implementation as a differentiable function of its record, with one configuration."""
    chosen = implementation(name)
    return _differentiable(chosen.function("forward"), chosen.function("backward"), config)


def _differentiable(forward: Any, backward: Any, config: Any) -> Callable[[LinearRecurrence], Any]:
    from ejkernel.types.pullback import ForwardResults, Pullback, tracing_differentiated_call

    @jax.custom_vjp
    def run(record: LinearRecurrence) -> Any:
        return ForwardResults(*forward(record, config)).output

    def saved(record: LinearRecurrence) -> Any:
        with tracing_differentiated_call():
            made = ForwardResults(*forward(record, config))
        return made.output, Pullback(record=record, cotangent=None, grad_fields=_floats(record), **made._asdict())

    def pull(start: Any, cotangent: Any) -> Any:
        found = backward(dataclasses.replace(start, cotangent=cotangent), config)
        return (dataclasses.replace(start.record, **found),)

    run.defvjp(saved, pull)
    return run


def _floats(record: LinearRecurrence) -> frozenset[str]:
    names = ("query", "key", "value", "decay", "beta", "dt", "skip", "initial_state")
    return frozenset(name for name in names if getattr(record, name) is not None)


def first_tokens(record: LinearRecurrence) -> LinearRecurrence:
    """The first tokens of the first row; packed documents are shortened alike."""
    bounds, record = record.cu_seqlens, dataclasses.replace(record, cu_seqlens=None)
    small = jax.tree.map(lambda x: x[:1, : min(CHECKED, x.shape[1])], record)
    if bounds is not None:
        small = dataclasses.replace(small, cu_seqlens=bounds * CHECKED // record.query.shape[1])
    return small


def in_float32(record: LinearRecurrence) -> LinearRecurrence:
    """The record with its floating arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, record)


def errors(cell: Cell, record: LinearRecurrence, call: Callable[[Any], Any]) -> dict[str, float]:
    """Relative errors of output and gradients on the first tokens of one row, against the formula in float32."""
    small = first_tokens(record)
    want = _everything(lambda x: reference(x)[0], in_float32(small), cell.grad_fields)
    got = _everything(call, small, cell.grad_fields)
    return {name: _relative(got[name], want[name]) for name in want}


def _everything(
    call: Callable[[Any], Any], record: LinearRecurrence, grad_fields: frozenset[str]
) -> dict[str, jax.Array]:
    cotangent = tuple(
        jax.random.normal(key, x.shape, jnp.float32).astype(jnp.bfloat16).astype(x.dtype)
        for key, x in zip(jax.random.split(jax.random.key(1)), jax.eval_shape(call, record), strict=True)
    )
    made, gradients = jax.jit(with_gradients(call, grad_fields))(record, cotangent)
    return {"output": made[0], "state": made[1], **gradients}


def _relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def _xla(record: LinearRecurrence) -> Callable[[LinearRecurrence], Any]:
    operation = "gated_linear_attention" if record.dt is None else "state_space_v2"
    operation = operation if record.beta is None else "gated_delta_rule"
    chosen = next(i for i in registry().implementations[operation] if i.name == "xla")
    config = chosen.config.heuristic(record, current_device(), "both")
    return _differentiable(chosen.function("forward"), chosen.function("backward"), config)


def configuration(record: LinearRecurrence) -> Any:
    """What a call gets: of a shipped table, or by the rule."""
    op = "gated_linear_attention" if record.dt is None else "state_space_v2"
    op = op if record.beta is None else "gated_delta_rule"
    request = Request(
        op=registry().ops[op],
        implementation=implementation(serving(record)),
        direction="both",
        device=current_device(),
        record=record,
    )
    return ConfigSelectorChain().choose(request).part


def is_selected(side: str, options: argparse.Namespace) -> bool:
    """Whether the command line asks for a side."""
    return not options.only or side in options.only.split(",")


def contenders(cell: Cell, record: LinearRecurrence, options: argparse.Namespace) -> dict[str, Callable[[Any], Any]]:
    """Everything of ours that can compute a cell, by name."""
    found: dict[str, Callable[[Any], Any]] = {}
    name = serving(record)
    space = implementation(name).config
    if is_selected("triton", options):
        found["ejkernel triton"] = kernel(name, configuration(record))
        if options.candidates:
            for config in space.candidates(record, current_device(), "forward"):
                found[str(config)] = kernel(name, config)
    if is_selected("cuda", options):
        gates_per_head = "cuda_chunked" if record.beta is None else "cuda_delta"
        found["ejkernel cuda"] = kernel("cuda_channel_gates" if cell.kind in ("gla", "kda") else gates_per_head, None)
    if is_selected("xla", options):
        found["ejkernel xla"] = _xla(record)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A cell whose sides are compiled: those of ours that are right, with both passes, and which peers are right."""

    cell: Cell
    passes: dict[str, tuple[Any, Any]]
    peers: frozenset[str]


def prepared(cell: Cell, options: argparse.Namespace) -> Prepared:
    """Compiles all sides of a cell, and checks their numbers. Frees the arrays, so that many cells can be ready."""
    record, compiled, others = cell.record(), {}, set()
    for name, call in contenders(cell, record, options).items():
        off = errors(cell, record, call)
        if max(off.values()) < 2e-2:
            compiled[name] = passes(call, record, cell.grad_fields)
        else:
            print(f"<!-- {name} is wrong on {cell}: {off} -->", flush=True)
    if is_selected("fla", options) and not cell.documents:
        want = reference(in_float32(first_tokens(record)))[0][0]
        for name, pair, _ in _recurrence_peers.peers(cell.kind, record):
            off = _relative(jnp.from_dlpack(pair[0]()[:1, :CHECKED].contiguous()), want)
            if off < 2e-2:
                others.add(name)
            else:
                print(f"<!-- {name} is wrong on {cell}: {off} -->", flush=True)
    return Prepared(cell=cell, passes=compiled, peers=frozenset(others))


def timed(ready: Prepared, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """One line for each side."""
    record, memory = ready.cell.record(), {}
    sides: dict[str, tuple[Side, Side]] = {}
    for name, (forward, both) in ready.passes.items():
        cotangent = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), forward.out_info)
        sides[name] = (functools.partial(forward, record), functools.partial(both, record, cotangent))
        memory[name] = both.memory_analysis().temp_size_in_bytes
    if ready.peers:
        for name, pair, most in _recurrence_peers.peers(ready.cell.kind, record):
            if name in ready.peers:
                sides[name], memory[name] = pair, most
    for name, times in _medians(sides, int(options.rounds)).items():
        yield str(ready.cell), name, *(f"{1e3 * s:.3f}" for s in times), f"{memory[name] / 1e6:.0f}"


def _medians(sides: dict[str, tuple[Side, Side]], rounds: int) -> dict[str, list[float]]:
    """Seconds of both passes of each side, interleaved."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}
    for pair in sides.values():
        sample(pair[0], 0.1)  # a GPU that was idle has yet to raise its clocks
    for _ in range(rounds):
        for name, pair in sides.items():
            for side, record in zip(pair, times[name], strict=True):
                record.append(sample(side))
    return {name: [statistics.median(record) for record in pair] for name, pair in times.items()}


def sample(side: Side, seconds: float = 0.03) -> float:
    """Seconds of a call, as the mean of calls one after the other."""
    start = time.perf_counter()
    made = side()
    _wait(made)
    calls = max(1, min(100, round(seconds / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(calls):
        made = side()
    _wait(made)
    return (time.perf_counter() - start) / calls


def _wait(made: Any) -> None:
    if _recurrence_peers.is_torch(made):
        _recurrence_peers.synchronise()
    else:
        jax.block_until_ready(made)


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--quick": "the short sequences alone",
            **shared.report.CANDIDATES_FLAG,
            "--long": "four rows, one long row and packed documents of it, all with the gates of fresh layers",
            "--heads": "the gated delta rule with 16 key and 32 value heads, and with 256 value channels",
            "--stages": "the kernels one by one, with many tiles",
        },
        {
            "--only": ("", "of triton, cuda, xla and fla, separated by commas; without it all"),
            "--cells": ("", "kinds, separated by commas; without it all"),
            "--rounds": ("7", "samples of each side"),
            "--part": ("1/1", "every n-th cell from the k-th on: k/n"),
            "--meet": ("", "a folder where the processes of all parts meet before they measure, one at a time"),
        },
    )
    print(shared.report.heading())
    listed = head_cells() if options.heads else cells(options.quick, options.long)
    chosen = [c for c in listed if not options.cells or c.kind in options.cells.split(",")]
    if options.stages:
        from linear_recurrence import _recurrence_stages

        for cell in chosen:
            _recurrence_stages.measure(cell, cell.record(), sample)
        return
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    part, parts = map(int, options.part.split("/"))
    ready = (prepared(cell, options) for cell in chosen[part - 1 :: parts])
    if options.meet:
        ready = iter(list(ready))
        meet(Path(options.meet), part, parts)
    for one in ready:
        for _ in shared.report.locked_rounds(1):
            for row in timed(one, options):
                print("| " + " | ".join(row) + " |", flush=True)


def meet(folder: Path, part: int, parts: int) -> None:
    """Waits until the processes of all parts have come here."""
    (folder / f"part{part}").touch()
    while len(list(folder.glob("part*"))) < parts:
        time.sleep(0.2)


if __name__ == "__main__":
    main()
