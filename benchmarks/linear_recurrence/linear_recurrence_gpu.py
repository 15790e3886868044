"""Linear recurrences on a GPU: gated linear attention, lightning, gates per head, Mamba-2, delta rules, long rows.

    python benchmarks/linear_recurrence/linear_recurrence_gpu.py  # the table
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --quick  # few rounds
    python benchmarks/linear_recurrence/linear_recurrence_gpu.py --long  # long rows, and packed documents
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
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence, reference
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.selection import Request
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from linear_recurrence import _recurrence_peers

COLUMNS = ("shape", "side", "forward ms", "with gradients ms", "memory with gradients MB")
Side = Callable[[], Any]
CHECKED = 512
"""Tokens that are compared with the formula."""


GATED = ("gla", "kda", "gate a head", "gated delta")
"""Kinds whose gates depend on the tokens."""

STRENGTHS = ("initial", "mild", "harsh")


def log_gates(kind: str, strength: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns log gates of a strength, [B, T, H, WIDTH].

    - initial: as a layer of the kind begins. Delta rules: -A dt, A uniform in 1 to 16 per head and dt log-uniform in
      1e-3 to 0.1, the initialisation of Mamba-2 (arXiv:2405.21060), which Gated DeltaNet (arXiv:2412.06464) and Kimi
      Linear (arXiv:2510.26692) have. Others: log_sigmoid(normal) / 16 (GLA, arXiv:2312.06635).
    - mild: log_sigmoid(normal) / 16, which is GLA's temperature.
    - harsh: log_sigmoid(normal).
    """
    logits = jax.nn.log_sigmoid(jax.random.normal(key, shape))
    if strength == "harsh":
        return logits
    if strength == "mild" or kind in ("gla", "gate a head"):
        return logits / 16
    rates, steps = jax.random.split(key)
    dt = jnp.exp(jax.random.uniform(steps, shape, minval=np.log(1e-3), maxval=np.log(0.1)))
    return -jax.random.uniform(rates, (shape[2], 1), minval=1.0, maxval=16.0) * dt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape; `kind` names the operation and its gates, `gates` their strength (see `log_gates`).

    Documents are sequences packed in one row, if any.
    """

    kind: str
    batch: int = 4
    length: int = 8192
    heads: int = 16
    keys: int = 128
    values: int = 128
    documents: int = 0
    gates: str = "initial"

    def __str__(self) -> str:
        packed = f", {self.documents} documents" if self.documents else ""
        strength = f", {self.gates} gates" if self.kind in GATED else ""
        return f"{self.kind} B{self.batch} S{self.length} H{self.heads} K{self.keys} V{self.values}{packed}{strength}"

    @property
    def delta(self) -> bool:
        """Whether it is a delta rule."""
        return self.kind in ("gated delta", "kda")

    def record(self, dtype: Any = jnp.bfloat16) -> LinearRecurrence:
        """The call as its operation's `lower` makes it, with normal numbers."""
        keys = iter(jax.random.split(jax.random.key(0), 6))
        b, t, h, mamba = self.batch, self.length, self.heads, self.kind == "mamba-2"

        def normal(heads: int, size: int) -> jax.Array:
            return jax.random.normal(next(keys), (b, t, heads, size), jnp.float32).astype(dtype)

        query, key = (normal(1 if mamba else h, self.keys) for _ in range(2))
        value, gate = normal(h, self.values), next(keys)
        fields: dict[str, Any] = {}
        if self.kind in ("gla", "kda"):
            fields["decay"] = log_gates(self.kind, self.gates, gate, (b, t, h, self.keys))
        elif self.kind in ("gate a head", "gated delta"):
            fields["decay"] = log_gates(self.kind, self.gates, gate, (b, t, h, 1))
        elif self.kind == "lightning":
            fields["decay"] = (-8 / h * 0.5 * jnp.arange(h, dtype=jnp.float32))[None, None, :, None]
        elif mamba:
            dt = 0.1 * jax.random.uniform(gate, (b, t, h))
            fields |= {"dt": dt, "decay": -dt[..., None], "skip": jnp.ones((1, 1, h))}
        if self.delta:
            # Layers of the delta rule normalise keys: longer ones would make the state grow.
            key = (key / jnp.linalg.norm(key.astype(jnp.float32), axis=-1, keepdims=True)).astype(dtype)
            fields["beta"] = jax.nn.sigmoid(jax.random.normal(next(keys), (b, t, h))).astype(dtype)
        if self.documents:
            # Of any length, as in training.
            cuts = np.sort(np.random.default_rng(0).integers(1, t, self.documents - 1))
            fields["cu_seqlens"] = jnp.asarray([0, *cuts, t], jnp.int32)
        scale = 1.0 if mamba else self.keys**-0.5
        return LinearRecurrence(query=query, key=key, value=value, softmax_scale=scale, **fields)

    @property
    def grad_fields(self) -> frozenset[str]:
        """What training needs the gradients of."""
        extra = {"gla": {"decay"}, "gate a head": {"decay"}, "mamba-2": {"decay", "dt", "skip"}}
        extra |= {"gated delta": {"decay", "beta"}, "kda": {"decay", "beta"}}
        return frozenset({"query", "key", "value"} | extra.get(self.kind, set()))


def cells(quick: bool, long: bool) -> Iterator[Cell]:
    """What is measured; packed documents have as many tokens as the rows above them, long rows twice as many."""
    if long:
        for kind in ("kda", "gated delta", "lightning", "gla", "gate a head"):
            yield Cell(kind=kind)
            yield Cell(kind=kind, batch=1, length=65536)
            yield Cell(kind=kind, batch=1, length=65536, documents=70)
        return
    for kind in ("gla", "lightning", "gate a head", "gated delta", "kda"):
        # GLA's initialisation is mild.
        for gates in STRENGTHS if kind in GATED else STRENGTHS[:1]:
            if gates != "mild" or kind in ("gated delta", "kda"):
                yield Cell(kind=kind, gates=gates)
    yield Cell(kind="mamba-2", batch=8, heads=64, values=64)
    if quick:
        return
    for kind in ("gla", "lightning", "gate a head", "gated delta", "kda"):
        yield Cell(kind=kind, batch=1, length=32768, documents=16)
    yield Cell(kind="mamba-2", batch=1, length=65536, heads=64, values=64, documents=32)
    for kind in ("gla", "lightning", "gate a head", "gated delta", "kda"):
        yield Cell(kind=kind, batch=1, length=65536)
        yield Cell(kind=kind, batch=1, length=65536, documents=70)


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


def contenders(cell: Cell, record: LinearRecurrence, options: argparse.Namespace) -> dict[str, Callable[[Any], Any]]:
    """Everything of ours that can compute a cell, by name."""
    found: dict[str, Callable[[Any], Any]] = {}
    name = serving(record)
    space = implementation(name).config
    if options.only in "triton":
        found["ejkernel triton"] = kernel(name, configuration(record))
        if options.candidates:
            for config in space.candidates(record, current_device(), "forward"):
                found[str(config)] = kernel(name, config)
    if options.only in "cuda" and cell.documents == 0:
        gates_per_head = "cuda_chunked" if record.beta is None else "cuda_delta"
        found["ejkernel cuda"] = kernel("cuda_channel_gates" if cell.kind in ("gla", "kda") else gates_per_head, None)
    if options.only in "xla":
        found["ejkernel xla"] = _xla(record)
    return found


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """One line for each side."""
    record, sides = cell.record(), {}
    memory: dict[str, str] = {}
    for name, call in contenders(cell, record, options).items():
        off = errors(cell, record, call)
        if not max(off.values()) < 2e-2:
            print(f"<!-- {name} is wrong on {cell}: {off} -->", flush=True)
            continue
        forward, both = passes(call, record, cell.grad_fields)
        cotangent = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(call, record))
        sides[name] = (functools.partial(forward, record), functools.partial(both, record, cotangent))
        memory[name] = f"{both.memory_analysis().temp_size_in_bytes / 1e6:.0f}"
    if options.only in "fla" and not cell.documents:
        want = reference(in_float32(first_tokens(record)))[0][0]
        for name, pair, most in _recurrence_peers.peers(cell.kind, record):
            off = _relative(jnp.from_dlpack(pair[0]()[:1, :CHECKED].contiguous()), want)
            if not off < 2e-2:
                print(f"<!-- {name} is wrong on {cell}: {off} -->", flush=True)
                continue
            sides[name], memory[name] = pair, f"{most / 1e6:.0f}"
    for name, times in _medians(sides, 3 if options.quick else 7).items():
        yield str(cell), name, *(f"{1e3 * s:.3f}" for s in times), memory[name]


def _medians(sides: dict[str, tuple[Side, Side]], rounds: int) -> dict[str, list[float]]:
    """Seconds of both passes of each side, interleaved."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}
    for pair in sides.values():
        sample(pair[0], 0.3)  # a GPU that was idle has yet to raise its clocks
    for _ in shared.report.locked_rounds(rounds):
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
            "--quick": "the short sequences, few rounds",
            **shared.report.CANDIDATES_FLAG,
            "--long": "four rows, one long row and packed documents of it, all with the gates of fresh layers",
            "--stages": "the kernels one by one, with many tiles",
        },
        {
            "--only": ("", "triton, cuda, xla or fla; without it all"),
            "--cells": ("", "kinds, separated by commas; without it all"),
        },
    )
    print(shared.report.heading())
    chosen = [c for c in cells(options.quick, options.long) if not options.cells or c.kind in options.cells.split(",")]
    if options.stages:
        from linear_recurrence import _recurrence_stages

        for cell in chosen:
            _recurrence_stages.measure(cell, cell.record(), sample)
        return
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    for cell in chosen:
        for row in timed(cell, options):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
