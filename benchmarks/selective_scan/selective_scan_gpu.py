"""The selective scan of Mamba-1 on a GPU: forward, and with all gradients, beside XLA, mamba_ssm and a copy.

    python benchmarks/selective_scan/selective_scan_gpu.py  # tables
    python benchmarks/selective_scan/selective_scan_gpu.py --quick  # one shape
    python benchmarks/selective_scan/selective_scan_gpu.py --candidates  # also every configuration worth measuring
    # those of which this is found
    python benchmarks/selective_scan/selective_scan_gpu.py --candidates 'recomputed=True|block_t=16'

All sides get the same bfloat16 arrays. A side is timed only if its output and gradients agree with XLA's in float32 on
a few channels of one row. Sides are interleaved, several calls a sample, and medians are printed. The rate counts x, dt
and y once (with gradients also those of x, dt and y, and x and dt again); that of the copy, what it reads and writes.
`memory` is what XLA reserves beside arguments and results.
"""

import argparse
import dataclasses
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import state_space_v1
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback, run_both_passes

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("shape", "pass", "side", "ms", "rate", "memory")
NAMES = ("hidden_states", "A", "B", "C", "D", "dt")
CHECKED = 64
"""Channels that are compared with float32."""

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to compute a cell: what it runs, and the bytes it takes beside arguments and results."""

    run: Callable[[], Any]
    memory: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One scan, forward or with gradients."""

    rows: int = 8
    tokens: int = 4096
    channels: int = 4096
    size: int = 16
    gradients: bool = False

    def __str__(self) -> str:
        return f"B{self.rows} S{self.tokens} E{self.channels} N{self.size}"

    @property
    def bytes(self) -> float:
        """Read and written by a pass that reads and writes everything once."""
        return 2.0 * self.rows * self.tokens * self.channels * (8 if self.gradients else 3)

    def inputs(self) -> Arrays:
        """x, A, B, C, D, dt as `state_space_v1` takes them."""
        keys = jax.random.split(jax.random.key(0), 4)
        token, state = (self.rows, self.tokens, self.channels), (self.rows, self.tokens, self.size)
        x = jax.random.normal(keys[0], token, jnp.bfloat16)
        b, c = (jax.random.normal(key, state, jnp.bfloat16) for key in keys[1:3])
        dt = jax.nn.softplus(jax.random.normal(keys[3], token, jnp.bfloat16) - 3)
        a = -jnp.broadcast_to(jnp.arange(1.0, self.size + 1), (self.channels, self.size))
        return x, a, b, c, jnp.ones(self.channels), dt


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    shapes: tuple[dict[str, int], ...] = ({},)
    if not quick:
        shapes += ({"rows": 1, "tokens": 32768}, {"rows": 1}, {"rows": 64, "tokens": 512})
    for shape in shapes:
        yield Cell(**shape)
        yield Cell(**shape, gradients=True)


def call(arrays: Arrays, weights: jax.Array | None, platform: str) -> Any:
    """The operation's output, and all gradients where there are weights."""

    def output(*arrays: jax.Array) -> jax.Array:
        return state_space_v1(*arrays, platform=platform)[0]

    if weights is None:
        return output(*arrays)
    made, pull = jax.vjp(output, *arrays)
    return made, *pull(weights)


def compiled(function: Callable[..., Any], *arguments: Any) -> Side:
    """A compiled call."""
    program = jax.jit(function).lower(*arguments).compile()
    analysis = program.memory_analysis()
    return Side(lambda: program(*arguments), None if analysis is None else analysis.temp_size_in_bytes)


def configured(arrays: Arrays, weights: jax.Array | None, pattern: str) -> dict[str, Side]:
    """The kernels with every configuration worth measuring whose name has the pattern.

    With gradients, the forward pass is that of the default configuration of the first that is chosen.
    """
    op, device, found = registry().ops["state_space_v1"], current_device(), {}
    record = op.lower(op.arguments(**dict(zip(NAMES, arrays, strict=True))))
    direction = "forward" if weights is None else "backward"
    kernels = [i for i in registry().implementations[op.name] if i.name in ("cuda", "triton")]
    kernels.sort(key=lambda i: i.constant_priority is not None)
    first = kernels[0].function("forward"), kernels[0].config.heuristic(record, device, "forward")
    for kernel in kernels:
        for config in kernel.config.candidates(record, device, direction) if getattr(kernel, direction) else ():
            name = f"{kernel.name} {config}"
            if not re.search(pattern, name):
                continue
            if weights is None:
                run = functools.partial(lambda f, c, r: f(r, c)[0][0], kernel.function("forward"), config)
                found[name] = compiled(run, record)
            else:
                run = functools.partial(both, first, (kernel.function("backward"), config))
                found[name] = compiled(run, record, weights)
    return found


def both(first: tuple[Any, Any], second: tuple[Any, Any], record: Any, weights: jax.Array) -> Any:
    """Output and gradients of two passes, each a function and its configuration, in the order of `call`."""
    start = Pullback(
        record=record,
        residuals=None,
        output=None,
        cotangent=(weights, jnp.zeros(record.decay.shape)[None].repeat(weights.shape[0], 0)),
        grad_fields=frozenset(("x", "step", "decay", "write", "read", "skip")),
    )
    run = functools.partial(run_both_passes, lambda r, _: first[0](r, first[1]))
    (output, _), found = run(lambda pullback, _: second[0](pullback, second[1]), start, None)
    return output, *(found[name] for name in ("x", "decay", "write", "read", "skip", "step"))


def mamba(arrays: Arrays, weights: jax.Array | None) -> Iterator[tuple[str, Side]]:
    """mamba_ssm's CUDA kernel, where it is installed, in its own layout [B, E, T]."""
    try:
        import torch
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return
    x, a, b, c, d, dt = (torch.utils.dlpack.from_dlpack(array) for array in arrays)
    x, dt, b, c = (array.transpose(1, 2).contiguous() for array in (x, dt, b, c))
    leaves = [array.requires_grad_(weights is not None) for array in (x, a, b, c, d, dt)]
    given = None if weights is None else torch.utils.dlpack.from_dlpack(weights).transpose(1, 2).contiguous()

    def run() -> Any:
        made = selective_scan_fn(x, dt, a, b, c, d)
        found = () if given is None else torch.autograd.grad(made, leaves, given)
        torch.cuda.synchronize()
        return made, found

    yield "mamba_ssm", Side(run)


def copy(cell: Cell) -> Side:
    """A copy that moves as many bytes."""
    source = jax.random.normal(jax.random.key(1), (int(cell.bytes) // 8,), jnp.float32)
    return compiled(lambda x: -x, source)


def sides(cell: Cell, arrays: Arrays, weights: jax.Array | None, options: argparse.Namespace) -> dict[str, Side]:
    """Everything that can compute a cell here."""
    found = {}
    for platform in ("auto", "cuda", "triton", "xla"):
        # Of few rows the scan in CUDA C++ has no backward pass: "auto" has Triton's behind it.
        if re.search(options.only, platform) and (platform != "cuda" or weights is None):
            run = functools.partial(call, platform=platform)
            found[f"ejkernel {platform}"] = compiled(run, arrays, weights)
    if options.candidates is not None:
        found |= configured(arrays, weights, options.candidates)
    return found


def truth(arrays: Arrays, weights: jax.Array | None) -> list[np.ndarray]:
    """Output, and gradients of x and dt, of a few channels of the last row, by XLA in float32."""
    x, a, b, c, d, dt = (array.astype(jnp.float32) for array in arrays)
    some = (x[-1:, :, :CHECKED], a[:CHECKED], b[-1:], c[-1:], d[:CHECKED], dt[-1:, :, :CHECKED])
    given = None if weights is None else weights[-1:, :, :CHECKED].astype(jnp.float32)
    return parts(jax.jit(functools.partial(call, platform="xla"))(some, given))


def parts(made: Any) -> list[np.ndarray]:
    """What `truth` has, of a call's output."""
    found = (made,) if isinstance(made, jax.Array) else (made[0], made[1], made[6])
    return [np.asarray(x[-1, :, :CHECKED].astype(jnp.float32)) for x in found]


def error(made: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest relative error of an array."""
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(made, want, strict=True))


def medians(contenders: dict[str, Side], rounds: int) -> dict[str, float]:
    """Seconds a call, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in shared.report.locked_rounds(rounds):
        for name, side in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(side.run())
            calls = max(1, min(20, round(0.03 / (time.perf_counter() - start))))
            start = time.perf_counter()
            made = None
            for _ in range(calls):  # one after the other, so that starting them costs nothing
                made = side.run()
            jax.block_until_ready(made)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side."""
    arrays = cell.inputs()
    weights = jax.random.normal(jax.random.key(2), arrays[0].shape, jnp.bfloat16) if cell.gradients else None
    want, contenders = truth(arrays, weights), sides(cell, arrays, weights, options)
    for name in list(contenders):
        off = error(parts(contenders[name].run()), want)
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    contenders |= {**dict(mamba(arrays, weights)), "copy": copy(cell)}
    for name, seconds in medians(contenders, 3 if options.quick else 7).items():
        memory = contenders[name].memory
        yield [
            str(cell),
            "with gradients" if cell.gradients else "forward",
            name,
            f"{seconds * 1e3:.3f}",
            f"{cell.bytes / seconds / 1e9:.0f} GB/s",
            "" if memory is None else f"{memory / 1e6:.0f} MB",
        ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds")
    parser.add_argument(
        "--candidates", nargs="?", const="", metavar="PATTERN", help="every configuration that this is found in, too"
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="platforms that this is found in; without it all")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in cells(options.quick) for row in timed(cell, options))
    )


if __name__ == "__main__":
    main()
