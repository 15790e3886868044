"""Grouped matmul on a GPU: the expert products of well-known models, forward and with both gradients.

    python benchmarks/grouped_matmul/grouped_matmul_gpu.py                  # tables
    python benchmarks/grouped_matmul/grouped_matmul_gpu.py --quick          # two shapes, fewer rounds
    python benchmarks/grouped_matmul/grouped_matmul_gpu.py --candidates     # also every configuration worth measuring
    python benchmarks/grouped_matmul/grouped_matmul_gpu.py --decoding       # few rows: what is read a second

All sides get the same normal bfloat16 arrays; the rows of groups are drawn from a Dirichlet(2) distribution, except in
rows named `even`. A side is timed only if its results agree with float32: some rows of the output and of the gradient
of lhs, and some of the gradient of rhs. Sides are interleaved, several calls a sample, and medians are printed. The
rate counts 2 M K N products forward and 6 M K N with gradients. `dense` is one product of as many operations.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants some memory, too

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import grouped_matmul
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("shape", "pass", "side", "ms", "rate")
TOLERANCE = 1e-2
SLOW = 3e12
"""Operations beyond which XLA's sides, of a few TFLOP/s, are left out of a quick run."""
COMPILERS = concurrent.futures.ThreadPoolExecutor(16)
Side = Callable[..., Any]
"""Takes the arrays of a cell: lhs, rhs and sizes, and with gradients a cotangent."""
Sides = tuple[Side, Side]
"""Forward, and forward with gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """M rows, K contracted, N columns, G groups."""

    name: str
    m: int
    k: int
    n: int
    groups: int
    even: bool = False
    used: int | None = None

    def __str__(self) -> str:
        shape = f"{self.name} M{self.m} K{self.k} N{self.n} G{self.groups}"
        return f"{shape} even" if self.even else shape

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each group."""
        if self.even:
            shares = np.full(self.groups, 1 / self.groups)
        else:
            shares = np.random.default_rng(0).dirichlet(np.full(self.groups, 2.0))
        ends = np.round(np.cumsum(shares) * self.m).astype(np.int32)
        ends[-1] = self.m
        return np.diff(ends, prepend=0).astype(np.int32)

    @property
    def operations(self) -> float:
        """Of one product."""
        return 2.0 * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Read and written by a forward pass: each used matrix, the rows and the output once."""
        return 2.0 * (int((self.sizes > 0).sum()) * self.k * self.n + self.m * (self.k + self.n))

    def inputs(self) -> tuple[jax.Array, ...]:
        """lhs, rhs, sizes and a cotangent."""
        shapes = (self.m, self.k), (self.groups, self.k, self.n), (self.m, self.n)

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            pairs = zip(jax.random.split(key, 3), shapes, strict=True)
            return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs)

        lhs, rhs, cotangent = jax.jit(make)(jax.random.key(0))
        return lhs, rhs, jnp.asarray(self.sizes), cotangent


CELLS = (
    Cell(name="moonlight", m=32768, k=2048, n=1408, groups=64),
    Cell(name="qwen3-30b gate_up", m=65536, k=2048, n=1536, groups=128),
    Cell(name="mixtral up", m=16384, k=4096, n=14336, groups=8),
    Cell(name="dsv3 gate_up", m=32768, k=7168, n=4096, groups=32),
    Cell(name="dsv3 down", m=32768, k=2048, n=7168, groups=32),
    Cell(name="qwen3-30b down", m=65536, k=768, n=2048, groups=128),
    Cell(name="mixtral down", m=16384, k=14336, n=4096, groups=8),
    Cell(name="qwen3-30b gate_up", m=65536, k=2048, n=1536, groups=128, even=True),
)
DECODING = (
    *(Cell(name="qwen3-30b gate_up", m=m, k=2048, n=1536, groups=128) for m in (64, 128, 256, 512)),
    Cell(name="mixtral up", m=64, k=4096, n=14336, groups=8),
)


def platforms(cell: Cell, quick: bool) -> Iterator[str]:
    """Ours."""
    yield from ("pallas", "triton")
    if not (quick or cell.operations > SLOW):
        yield "xla"


def both(call: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A call with its gradients."""

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Any:
        output, pullback = jax.vjp(lambda x, y: call(x, y, sizes), lhs, rhs)
        return (output, *pullback(cotangent))

    return run


def bound(call: Callable[..., Any], shapes: tuple[Any, ...]) -> Side:
    """A call, which is compiled while others are prepared."""
    future = COMPILERS.submit(jax.jit(call).lower(*shapes).compile)
    return lambda *arrays: future.result()(*arrays)


def jax_sides(cell: Cell, quick: bool, only: str) -> dict[str, Sides]:
    """Forward, and forward with gradients, of ours and of JAX's own."""
    calls: dict[str, Any] = {}
    for platform in platforms(cell, quick):
        if only in platform:
            options: Any = {"platform": platform, "preferred_element_type": jnp.bfloat16}
            calls[f"ejkernel {platform}"] = functools.partial(grouped_matmul, **options)
    if not (quick or only or cell.operations > SLOW / 10):
        calls["jax.lax.ragged_dot"] = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.bfloat16)
    found, shapes = {}, jax.eval_shape(cell.inputs)
    for name, call in calls.items():
        try:
            found[name] = bound(call, shapes[:3]), bound(both(call), shapes)
        except NotImplementedError:
            continue
    return found


def torch_sides() -> dict[str, Sides]:
    """PyTorch's grouped product, where it is installed."""
    if not importlib.util.find_spec("torch"):
        return {}
    import torch

    taken: dict[int, Any] = {}

    def tensors(arrays: tuple[jax.Array, ...]) -> Any:
        if id(arrays[0]) not in taken:
            taken.clear()
            taken[id(arrays[0])] = [torch.from_dlpack(x) for x in arrays]
            sizes = taken[id(arrays[0])][2]
            taken[id(arrays[0])].append(torch.cumsum(sizes, 0, dtype=torch.int32))
        return taken[id(arrays[0])]

    def forward(*arrays: Any) -> Any:
        lhs, rhs, *_, ends = tensors(arrays)
        with torch.no_grad():
            return torch._grouped_mm(lhs, rhs, offs=ends)

    def passes(*arrays: Any) -> Any:
        lhs, rhs, _, cotangent, ends = tensors(arrays)
        leaves = [x.detach().requires_grad_() for x in (lhs, rhs)]
        output = torch._grouped_mm(*leaves, offs=ends)
        return (output, *torch.autograd.grad(output, leaves, cotangent))

    return {"torch._grouped_mm": (forward, passes)}


def configured(cell: Cell, part: str, only: str) -> Iterator[tuple[str, Side]]:
    """Our kernels with every configuration worth measuring: a forward pass, or the gradient of `part` alone."""
    direction: Any = "forward" if part == "forward" else "backward"
    op = registry().ops["grouped_matmul"]
    shapes = jax.eval_shape(cell.inputs)
    fields = dict(zip(("lhs", "rhs", "group_sizes"), shapes, strict=False))
    args = op.arguments(**fields, preferred_element_type=jnp.bfloat16)
    record = jax.eval_shape(op.lower, args)  # of shapes
    for implementation in registry().implementations[op.name]:
        if implementation.backend != "gpu" or only not in implementation.platform:
            continue
        function = implementation.function(direction)

        def forward(*arrays: Any, f: Any, c: Any) -> Any:
            return f(_record(op, *arrays[:3]), c)[0]

        def gradients(*arrays: Any, f: Any, c: Any) -> Any:
            wanted, (*given, do) = frozenset({part}), arrays
            saved = Pullback(record=_record(op, *given), residuals=(), output=None, cotangent=do, grad_fields=wanted)
            return f(saved, c)[part]

        run = forward if direction == "forward" else gradients
        for config in implementation.config.candidates(record, current_device(), direction):
            call = functools.partial(run, f=function, c=config)
            yield f"{implementation.name} {_short(config)}", bound(call, shapes)


def _record(op: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
    return op.lower(op.arguments(lhs=lhs, rhs=rhs, group_sizes=sizes, preferred_element_type=jnp.bfloat16))


def _short(config: Any) -> str:
    return " ".join(f"{name.replace('block_', '')}={x}" for name, x in dataclasses.asdict(config).items())


def truth(cell: Cell, arrays: tuple[jax.Array, ...]) -> Callable[[Any], float]:
    """What gives the largest relative error of a side's results."""
    ends = np.cumsum(cell.sizes)
    rows = np.unique(np.clip(np.concatenate([ends[:2], ends[:2] - 1, [0, cell.m - 1, cell.m // 2]]), 0, cell.m - 1))
    groups = np.searchsorted(ends, rows, side="right")
    group = int(np.argmax(cell.sizes))
    own = slice(int(ends[group] - cell.sizes[group]), int(ends[group]))
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    highest = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def make(lhs: jax.Array, rhs: jax.Array, _: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        places = jnp.asarray(rows), jnp.asarray(groups)
        output = jax.lax.map(lambda at: highest(wide(lhs[at[0]]), wide(rhs[at[1]])), places)
        gradient = jax.lax.map(lambda at: highest(wide(rhs[at[1]]), wide(cotangent[at[0]])), places)
        return output, gradient, highest(wide(lhs[own, :256]).T, wide(cotangent[own]))

    want = jax.jit(make)(*arrays)

    @jax.jit
    def distance(made: Any) -> jax.Array:
        output, *gradients = made
        got = [output[rows]]
        if gradients:
            got += [gradients[0][rows], gradients[1][group, :256]]
        pairs = zip(got, want[: len(got)], strict=True)
        return jnp.max(jnp.stack([jnp.linalg.norm(wide(x) - y) / jnp.linalg.norm(y) for x, y in pairs]))

    def error(made: Any) -> float:
        return float(distance([jnp.from_dlpack(x.detach()) if hasattr(x, "detach") else x for x in made]))

    return error


def dense(cell: Cell) -> Side:
    """One product with as many operations, by the first of the matrices."""
    lhs, rhs, *_ = jax.eval_shape(cell.inputs)
    side = bound(jnp.matmul, (lhs, jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)))
    first: dict[int, jax.Array] = {}

    def run(*arrays: Any) -> Any:
        if id(arrays[1]) not in first:
            first[id(arrays[1])] = arrays[1][0]
        return side(arrays[0], first[id(arrays[1])])

    return run


def measured(sides: dict[str, Side], arrays: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Medians of interleaved samples, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in shared.report.locked_rounds(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            _ready(side(*arrays))
            calls = max(1, min(40, round(0.02 / (time.perf_counter() - start))))
            start = time.perf_counter()
            made = [side(*arrays) for _ in range(calls)][-1]  # one after the other, so that starting them costs nothing
            _ready(made)
            times[name].append((time.perf_counter() - start) / calls)
            del made
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _ready(made: Any) -> None:
    if "torch" in type(made[0] if isinstance(made, tuple) else made).__module__:
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(made)


def right(cell: Cell, arrays: tuple[jax.Array, ...], sides: dict[str, Sides]) -> dict[str, Sides]:
    """The sides whose results agree with float32."""
    error, found = truth(cell, arrays), dict[str, Sides]()
    for name, pair in sides.items():
        try:
            off = error(pair[1](*arrays))
        except RuntimeError as failure:
            print(f"<!-- {name} failed on {cell}: {str(failure)[:200]} -->", flush=True)
            continue
        if off < TOLERANCE:
            found[name] = pair
        else:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
    return found


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A cell's sides, by pass."""

    sides: dict[str, Sides]
    dense: Side
    forward: dict[str, Side]
    lhs: dict[str, Side]
    rhs: dict[str, Side]


def prepare(cell: Cell, options: argparse.Namespace) -> Prepared:
    """Begins to compile what a cell needs."""
    sides = jax_sides(cell, options.quick or options.decoding, options.only)
    sides |= {} if options.only else torch_sides()
    chosen = [
        dict(configured(cell, part, options.only)) if options.candidates else {} for part in ("forward", "lhs", "rhs")
    ]
    return Prepared(sides, dense(cell), *chosen)


def timed(cell: Cell, prepared: Prepared, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side and pass."""
    arrays, rounds = cell.inputs(), 3 if options.quick else 7
    sides = right(cell, arrays, prepared.sides)
    forward = {name: pair[0] for name, pair in sides.items()} | {"dense": prepared.dense}
    both = {name: pair[1] for name, pair in sides.items()}
    passes = {
        "forward": (forward, 1, arrays[:3]),
        "forward alone": (prepared.forward, 1, arrays),
        "with gradients": (both, 3, arrays),
        "gradient of lhs alone": (prepared.lhs, 1, arrays),
        "gradient of rhs alone": (prepared.rhs, 1, arrays),
    }
    for label, (these, products, given) in passes.items():
        if "gradient" in label and options.decoding:
            continue
        for name, seconds in measured(these, given, rounds).items():
            rate = f"{products * cell.operations / seconds / 1e12:.0f} TFLOP/s"
            rate = f"{cell.bytes / seconds / 1e9:.0f} GB/s" if options.decoding else rate
            yield [str(cell), label, name, f"{seconds * 1e3:.3f}", rate]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {"--quick": "fewer sides and rounds", **shared.report.CANDIDATES_FLAG, "--decoding": "few rows"},
        {
            "--only": ("", "a platform; without it all"),
            "--cells": ("", "numbers of cells, with commas; without it all"),
        },
    )
    cells = DECODING if options.decoding else CELLS
    chosen = [cells[int(n)] for n in options.cells.split(",")] if options.cells else cells
    prepared = [prepare(cell, options) for cell in chosen]
    made = zip(chosen, prepared, strict=True)
    shared.report.print_rows_as_measured(COLUMNS, (row for cell, sides in made for row in timed(cell, sides, options)))


if __name__ == "__main__":
    main()
