"""The short causal convolution on a GPU: forward, with gradients, packed and for one token, beside XLA and a copy.

    python benchmarks/causal_convolution/causal_conv1d_gpu.py               # tables
    python benchmarks/causal_convolution/causal_conv1d_gpu.py --quick       # one shape
    python benchmarks/causal_convolution/causal_conv1d_gpu.py --candidates  # also every configuration worth measuring

All sides get the same bfloat16 arrays, four weights a channel, a bias and SiLU. A side is timed only if its output and
gradients agree with XLA's in float32 on a few channels of one row. Sides are interleaved, several calls a sample, and
medians are printed. The rate counts x and y once, with gradients also x, dy and dx; that of the copy, what it reads and
writes.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import causal_conv1d
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from selective_scan.selective_scan_gpu import CHECKED, Side, compiled, error, medians

COLUMNS = ("shape", "pass", "side", "ms", "rate")
WIDTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One call, forward or with gradients."""

    rows: int = 8
    tokens: int = 4096
    channels: int = 4096
    sequences: int = 0
    state: bool = False
    gradients: bool = False

    def __str__(self) -> str:
        shape = f"B{self.rows} S{self.tokens} E{self.channels}"
        return shape + (f", {self.sequences} packed" if self.sequences else "") + (", state" if self.state else "")

    @property
    def bytes(self) -> float:
        """Read and written by a pass that reads and writes everything once."""
        return 2.0 * self.rows * self.tokens * self.channels * (5 if self.gradients else 2)

    def inputs(self) -> dict[str, jax.Array]:
        """Arguments of `causal_conv1d`."""
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"x": (self.rows, self.tokens, self.channels), "weight": (self.channels, WIDTH)}
        shapes["bias"] = (self.channels,)
        if self.state:
            shapes["initial_state"] = (self.rows, self.channels, WIDTH - 1)
        made = {
            name: jax.random.normal(key, shape, jnp.bfloat16)
            for (name, shape), key in zip(shapes.items(), keys, strict=False)
        }
        if self.sequences:
            made["cu_seqlens"] = jnp.linspace(0, self.tokens, self.sequences + 1).astype(jnp.int32)
        return made


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    for gradients in (False, True):
        yield Cell(gradients=gradients)
        if not quick:
            yield Cell(rows=1, tokens=32768, sequences=22, gradients=gradients)
            yield Cell(rows=1, tokens=65536, channels=2048, gradients=gradients)
    if not quick:
        yield Cell(rows=4096, tokens=1, state=True)


def call(given: dict[str, jax.Array], weights: jax.Array | None, platform: str, state: bool = False) -> Any:
    """The operation's output, and all gradients where there are weights."""
    whole = {name: x for name, x in given.items() if name == "cu_seqlens"}

    def output(arrays: dict[str, jax.Array]) -> Any:
        return causal_conv1d(**arrays, **whole, activation="silu", platform=platform, return_state=state)

    arrays = {name: x for name, x in given.items() if name != "cu_seqlens"}
    if weights is None:
        made = output(arrays)
        return made if state else (made,)
    made, pull = jax.vjp(output, arrays)
    return made, pull(weights)[0]["x"], pull(weights)[0]["weight"]


def configured(cell: Cell, arrays: dict[str, jax.Array], weights: jax.Array | None) -> Iterator[tuple[str, Side]]:
    """The Triton kernels with every configuration worth measuring."""
    op = registry().ops["causal_conv1d"]
    (kernel,) = (i for i in registry().implementations[op.name] if i.name == "triton")
    record = op.lower(op.arguments(**arrays, activation="silu"))
    direction = "forward" if weights is None else "backward"
    for config in kernel.config.candidates(record, current_device(), direction):
        if weights is None:
            yield str(config), compiled(lambda r, c=config: (kernel.function("forward")(r, c)[0][0],), record)
            continue

        def both(record: Any, weights: jax.Array, config: Any = config) -> Any:
            before = kernel.config.heuristic(record, current_device(), "forward")
            output, final = kernel.function("forward")(record, before)[0]
            start = Pullback(
                record=record,
                residuals=(),
                output=(output, final),
                cotangent=(weights, jnp.zeros_like(final)),
                grad_fields=frozenset(("x", "weight", "bias")),
            )
            found = kernel.function("backward")(start, config)
            return output, found["x"], found["weight"], found["bias"]

        yield str(config), compiled(both, record, weights)


def sides(cell: Cell, arrays: dict[str, jax.Array], weights: jax.Array | None, options: Any) -> dict[str, Side]:
    """Everything that can compute a cell here."""
    found: dict[str, Side] = {}
    for platform in ("triton", "xla"):
        if options.only in platform:
            run = functools.partial(call, platform=platform, state=cell.state)
            found[f"ejkernel {platform}"] = compiled(run, arrays, weights)
    return found | (dict(configured(cell, arrays, weights)) if options.candidates else {})


def truth(arrays: dict[str, jax.Array], weights: jax.Array | None) -> list[np.ndarray]:
    """Output, and the gradient of x, of a few channels of the last row, by XLA in float32."""
    some = {
        name: x if name == "cu_seqlens" else x[-1:, :, :CHECKED] if name == "x" else x[:CHECKED]
        for name, x in arrays.items()
        if name != "initial_state"
    }
    if "initial_state" in arrays:
        some["initial_state"] = arrays["initial_state"][-1:, :CHECKED]
    some = {name: x if name == "cu_seqlens" else x.astype(jnp.float32) for name, x in some.items()}
    given = None if weights is None else weights[-1:, :, :CHECKED].astype(jnp.float32)
    return parts(jax.jit(functools.partial(call, platform="xla"))(some, given), weights)


def parts(made: Any, weights: jax.Array | None) -> list[np.ndarray]:
    """What `truth` has, of a call's output."""
    return [np.asarray(x[-1, :, :CHECKED].astype(jnp.float32)) for x in (made[:1] if weights is None else made[:2])]


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side."""
    arrays = cell.inputs()
    weights = jax.random.normal(jax.random.key(2), arrays["x"].shape, jnp.bfloat16) if cell.gradients else None
    want, contenders = truth(arrays, weights), sides(cell, arrays, weights, options)
    for name in list(contenders):
        off = error(parts(contenders[name].run(), weights), want)
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    source = jax.random.normal(jax.random.key(1), (max(1, int(cell.bytes) // 8),), jnp.float32)
    contenders["copy"] = compiled(lambda x: -x, source)
    for name, seconds in medians(contenders, 3 if options.quick else 7).items():
        direction = "with gradients" if cell.gradients else "forward"
        yield [str(cell), direction, name, f"{seconds * 1e3:.4f}", f"{cell.bytes / seconds / 1e9:.0f} GB/s"]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {"--quick": "one shape, few rounds", **shared.report.CANDIDATES_FLAG},
        {"--only": ("", "a platform; without it all")},
    )
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in cells(options.quick) for row in timed(cell, options))
    )


if __name__ == "__main__":
    main()
