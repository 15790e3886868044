"""Quantised matmul on a GPU while decoding: few rows against weights of 4 and 8 bits.

    python benchmarks/quantized_matmul/quantized_matmul_gpu.py               # a table
    python benchmarks/quantized_matmul/quantized_matmul_gpu.py --quick       # two shapes, few rounds
    python benchmarks/quantized_matmul/quantized_matmul_gpu.py --candidates  # also every configuration worth measuring

A call goes through sixteen weight matrices, more than the second-level cache holds, as the layers of a model do; the
time is that of one. A side is timed only if its output agrees with float64. Sides are interleaved, and medians are
printed. The rate counts the bytes of codes, scales and zeros, or of bfloat16 weights, once; that of the copy, what it
reads and writes.
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

from ejkernel.modules import quantized_matmul
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.quantization import dequantize, quantize

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("shape", "side", "us", "GB/s")
LAYERS = 16
Side = Callable[[], list[Any]]
Layer = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape and format."""

    m: int = 16
    k: int = 4096
    n: int = 14336
    mode: Any = "affine"
    bits: int = 4
    transpose: bool = False

    def __str__(self) -> str:
        layout = ", transposed" if self.transpose else ""
        return f"M{self.m} K{self.k} N{self.n} {self.mode} {self.bits} bits{layout}"

    @property
    def options(self) -> dict[str, Any]:
        """Of the operation."""
        group = 32 if self.mode.startswith("mx") else 64
        return {"group_size": group, "bits": self.bits, "mode": self.mode, "transpose": self.transpose}


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    yield Cell()
    yield Cell(transpose=True)
    if quick:
        return
    yield Cell(m=1)
    yield Cell(m=64)
    yield Cell(m=1, transpose=True)
    yield Cell(m=64, transpose=True)
    yield Cell(m=8)
    yield Cell(m=32)
    yield Cell(m=8, transpose=True)
    yield Cell(m=32, transpose=True)
    yield Cell(k=14336, n=4096)
    yield Cell(k=14336, n=4096, transpose=True)
    yield Cell(k=8192, n=8192)
    yield Cell(bits=8)
    yield Cell(mode="mxfp4")
    yield Cell(mode="nf4")
    yield Cell(mode="mxfp8", bits=8)


def layers(cell: Cell) -> tuple[jax.Array, list[Layer], np.ndarray]:
    """x, packed weights of all layers, and the first layer's output in float64."""
    axis, group = ("col" if cell.transpose else "row"), cell.options["group_size"]
    make = jax.jit(lambda key: quantize(jax.random.normal(key, (cell.n, cell.k)), group, cell.bits, cell.mode, axis))
    packed = [make(jax.random.key(layer)) for layer in range(LAYERS)]
    x = jax.random.normal(jax.random.key(99), (cell.m, cell.k), jnp.bfloat16)
    weights = dequantize(*packed[0], group_size=group, bits=cell.bits, mode=cell.mode, axis=axis)
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    return x, packed, exact


def sides(cell: Cell, x: jax.Array, packed: list[Layer], candidates: bool) -> dict[str, Side]:
    """Everything that can compute a cell here."""
    found: dict[str, Side] = {}
    served = cell.mode == "affine" and cell.bits == 4
    for platform in ("cuda", "triton", "xla") if served else ("triton", "xla"):
        call = functools.partial(quantized_matmul, platform=platform, **cell.options)
        found[f"ejkernel {platform}"] = every(lambda layer, call=call: call(x, *layer), packed)
    if not candidates:
        return found
    op = registry().ops["quantized_matmul"]
    names = ("cuda", "triton") if served else ("triton",)
    implementations = [i for i in registry().implementations[op.name] if i.name in names]
    named = [dict(zip(("w", "scales", "zeros"), layer, strict=False)) for layer in packed]
    records = [op.lower(op.arguments(x=x, **layer, **cell.options)) for layer in named]
    for implementation in implementations:
        forward = implementation.function("forward")
        for config in implementation.config.candidates(records[0], current_device(), "forward"):
            found[f"{implementation.name} {config}"] = every(lambda r, f=forward, c=config: f(r, c)[0], records)
    return found


def every(call: Callable[[Any], jax.Array], arguments: list[Any]) -> Side:
    """One program that makes a call for all layers."""
    compiled = jax.jit(lambda arguments: [call(x) for x in arguments]).lower(arguments).compile()
    return lambda: compiled(arguments)


def size(arrays: tuple[jax.Array, ...]) -> int:
    """Bytes of arrays."""
    return sum(array.nbytes for array in arrays)


def baselines(cell: Cell, x: jax.Array, packed: tuple[jax.Array, ...]) -> dict[str, tuple[Side, int]]:
    """The product with bfloat16 weights, and a copy as large as the packed weights; with the bytes that each moves."""
    keys = jax.random.split(jax.random.key(5), LAYERS)
    dense = [jax.random.normal(key, (cell.k, cell.n), jnp.bfloat16) for key in keys]
    words = [jax.random.normal(key, (size(packed) // 8,), jnp.float32) for key in keys]
    return {
        "bfloat16 weights": (every(lambda weights: x @ weights, dense), dense[0].nbytes),
        "copy": (every(lambda words: -words, words), 2 * words[0].nbytes),
    }


def timed(cell: Cell, rounds: int, candidates: bool) -> list[list[str]]:
    """One line for each side."""
    x, packed, exact = layers(cell)
    contenders = sides(cell, x, packed, candidates)
    for name in list(contenders):
        off = np.linalg.norm(np.asarray(contenders[name]()[0], np.float64) - exact) / np.linalg.norm(exact)
        if not off < 5e-3:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    moved = dict.fromkeys(contenders, size(packed[0]))
    for name, (side, count) in baselines(cell, x, packed[0]).items():
        contenders[name], moved[name] = side, count
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in shared.report.locked_rounds(rounds):
        for name, side in contenders.items():
            jax.block_until_ready(side())
            start = time.perf_counter()
            made = [side() for _ in range(10)][-1]  # one after the other, so that starting them costs nothing
            jax.block_until_ready(made)
            times[name].append((time.perf_counter() - start) / (10 * LAYERS))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [[str(cell), name, f"{s * 1e6:.1f}", f"{moved[name] / s / 1e9:.0f}"] for name, s in medians.items()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Quantised matmul while decoding, on a GPU.")
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--candidates", action="store_true", help="every configuration, too")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    rounds = 3 if options.quick else 7
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in cells(options.quick) for row in timed(cell, rounds, options.candidates))
    )


if __name__ == "__main__":
    main()
