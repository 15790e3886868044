"""Grouped matmul of rows and matrices of 8 bits on a GPU, against bfloat16 and PyTorch.

    python benchmarks/grouped_matmul/grouped_matmul_8bit_gpu.py  # three shapes
    python benchmarks/grouped_matmul/grouped_matmul_8bit_gpu.py --candidates  # also every configuration in Mosaic GPU
    python benchmarks/grouped_matmul/grouped_matmul_8bit_gpu.py --platforms pallas  # without Triton

Normal float8_e4m3fn arrays, matrices with their columns first, bfloat16 output; the rows of groups are drawn from a
Dirichlet(2) distribution. Scales are one a row and one a column (`rows`), or one for 128 contracted elements of
either (`blocks`), or of a row and of 128 columns (`squares`). `quick` sums as the matrix unit does
(`precision="default"`, PyTorch's `use_fast_accum`), `exact` in float32. A side's relative error against float32 is
printed, of some rows. Sides are interleaved, and medians are printed. The rate counts 2 M K N products.
"""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import grouped_matmul
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from grouped_matmul import grouped_matmul_gpu as bench

COLUMNS = ("shape", "side", "ms", "rate", "relative error")
CELLS = tuple(bench.CELLS[n] for n in (1, 0, 3))
BLOCK = 128
"""Contracted elements that share a scale."""
BFLOAT16 = "ejkernel bfloat16"
"""The side that is given the same rows and matrices in 16 bits."""


def inputs(cell: bench.Cell) -> tuple[jax.Array, ...]:
    """lhs, rhs, sizes, scales of rows and columns, those of blocks of both, and those of squares of 128 x 128."""

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys, eight = jax.random.split(key, 6), jnp.float8_e4m3fn
        lhs = jax.random.normal(keys[0], (cell.m, cell.k), jnp.bfloat16).astype(eight)
        rhs = jax.random.normal(keys[1], (cell.groups, cell.n, cell.k), jnp.bfloat16).astype(eight)
        shapes = (cell.m, 1), (cell.groups, 1, 1, cell.n), (cell.m, cell.k // BLOCK)
        shapes += ((cell.groups, cell.k // BLOCK, 1, cell.n),)
        scales = [jax.random.uniform(k, s, jnp.float32, 0.5, 1) for k, s in zip(keys[2:], shapes, strict=True)]
        squares = jnp.repeat(scales[3][..., ::BLOCK], BLOCK, axis=-1)[..., : cell.n]
        return lhs, rhs, jnp.asarray(cell.sizes), *scales, squares

    return jax.jit(make)(jax.random.key(0))


KINDS = {"rows": (0, 1), "blocks": (2, 3), "squares": (2, 4)}
"""Which scales a side takes."""


def scaled(lhs: Any, rhs: Any, sizes: Any, *scales: Any, kind: str, **options: Any) -> jax.Array:
    """Ours."""
    of_rows, of_columns = (scales[n] for n in KINDS[kind])
    options |= {"transpose_rhs": True, "preferred_element_type": jnp.bfloat16}
    return grouped_matmul(lhs, rhs, sizes, lhs_scale=of_rows, rhs_scale=of_columns, **options)


def configured(cell: bench.Cell) -> Iterator[tuple[str, bench.Side]]:
    """The kernel in Mosaic GPU with every configuration worth measuring, scales in blocks."""
    op = registry().ops["grouped_matmul"]
    (kernel,) = (x for x in registry().implementations[op.name] if x.name == "mosaic_gpu_fp8")

    def record(lhs: Any, rhs: Any, sizes: Any, *scales: Any) -> Any:
        fields = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "lhs_scale": scales[2], "rhs_scale": scales[3]}
        return op.lower(op.arguments(**fields, transpose_rhs=True, preferred_element_type=jnp.bfloat16))

    shapes = jax.eval_shape(lambda: inputs(cell))
    for config in kernel.config.candidates(jax.eval_shape(record, *shapes), current_device(), "forward"):
        name = " ".join(f"{name}={x}" for name, x in dataclasses.asdict(config).items())

        def run(*arrays: Any, c: Any = config) -> jax.Array:
            return kernel.function("forward")(record(*arrays), c)[0]

        yield f"pallas blocks {name}", bench.bound(run, shapes)


def wide(lhs: Any, rhs: Any, sizes: Any, *_: Any) -> jax.Array:
    """The same shape in bfloat16."""
    options: Any = {"transpose_rhs": True, "preferred_element_type": jnp.bfloat16}
    return grouped_matmul(lhs, rhs, sizes, **options)


def torch_sides(arrays: tuple[jax.Array, ...]) -> dict[str, bench.Side]:
    """PyTorch's grouped product of 8 bits, where it is installed."""
    if not importlib.util.find_spec("torch"):
        return {}
    import torch

    def tensor(x: jax.Array) -> Any:
        if x.dtype != jnp.float8_e4m3fn:
            return torch.from_dlpack(x)
        return torch.from_dlpack(x.view(jnp.uint8)).view(torch.float8_e4m3fn)

    lhs, rhs, sizes, of_rows, of_columns = (tensor(x) for x in arrays[:5])
    ends, matrices = torch.cumsum(sizes, 0, dtype=torch.int32), rhs.transpose(-2, -1)
    scales = of_rows.reshape(-1), of_columns.reshape(rhs.shape[0], -1)

    def run(*_: Any, fast: bool) -> Any:
        options = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return torch._scaled_grouped_mm(lhs, matrices, *scales, **options)

    return {
        "torch._scaled_grouped_mm rows quick": functools.partial(run, fast=True),
        "torch._scaled_grouped_mm rows exact": functools.partial(run, fast=False),
    }


def errors(cell: bench.Cell, arrays: tuple[jax.Array, ...], sides: dict[str, bench.Side]) -> dict[str, float]:
    """Relative errors of some rows."""
    lhs, rhs, _, *scales = arrays
    rows = np.array([0, 5, cell.m // 2, cell.m - 1])
    groups = np.searchsorted(np.cumsum(cell.sizes), rows, side="right")
    full = lambda x: x.astype(jnp.float32)  # noqa: E731

    def want(of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
        length = cell.k // of_rows.shape[1]
        left = full(lhs[rows]) * jnp.repeat(of_rows[rows], length, axis=1)
        right = [full(rhs[g]) * jnp.repeat(of_columns[g, :, 0].T, length, axis=1) for g in groups]
        products = [jnp.matmul(x, y.T, precision="highest") for x, y in zip(left, right, strict=True)]
        return jnp.stack(products)

    wants = {name: want(*(scales[n] for n in pair)) for name, pair in KINDS.items()}
    found = {}
    for name, side in sides.items():
        made = side(*arrays)
        made = jnp.from_dlpack(made) if hasattr(made, "untyped_storage") else made
        truth = next(wants[kind] for kind in KINDS if kind in name)
        found[name] = float(jnp.linalg.norm(full(made[rows]) - truth) / jnp.linalg.norm(truth))
    return found


def prepare(cell: bench.Cell, platforms: list[str], *, candidates: bool) -> dict[str, bench.Side]:
    """Our sides; they are compiled while those of other shapes are prepared."""
    kinds: dict[str, dict[str, Any]] = {
        f"{platform} {kind}{' quick' if quick else ''}": {"kind": kind, "platform": platform}
        | ({"precision": "default"} if quick else {})
        for kind, quick in (("rows", True), ("rows", False), ("squares", False), ("blocks", False))
        for platform in platforms
    }
    shapes = jax.eval_shape(lambda: inputs(cell))
    sides: dict[str, bench.Side] = {
        f"ejkernel {name}": bench.bound(functools.partial(scaled, **options), shapes) for name, options in kinds.items()
    }
    sides |= dict(configured(cell)) if candidates else {}
    pair = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in shapes[:2])
    return {**sides, BFLOAT16: bench.bound(wide, (*pair, *shapes[2:]))}


def measure(cell: bench.Cell, sides: dict[str, bench.Side]) -> None:
    """Prints the lines of a shape."""
    arrays = inputs(cell)
    eight = {name: side for name, side in sides.items() if name != BFLOAT16} | torch_sides(arrays)
    off = errors(cell, arrays, eight)
    pair = tuple(x.astype(jnp.bfloat16) for x in arrays[:2])
    # Among the others: a side that has the chip for itself finds it cooler, and clocks are higher.
    wide_side = lambda *_: sides[BFLOAT16](*pair, *arrays[2:])  # noqa: E731
    times = bench.measured({**eight, BFLOAT16: wide_side}, arrays, 5)
    for name, seconds in times.items():
        rate, error = f"{cell.operations / seconds / 1e12:.0f} TFLOP/s", f"{off[name]:.1e}" if name in off else ""
        print(f"| {cell} | {name} | {seconds * 1e3:.3f} | {rate} | {error} |", flush=True)


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {"--candidates": "every configuration in Mosaic GPU, too"},
        {"--cells": ("0,1,2", "numbers of shapes, with commas"), "--platforms": ("triton,pallas", "ours, with commas")},
    )
    print(shared.report.heading())
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    cells = [CELLS[int(number)] for number in options.cells.split(",")]
    platforms = options.platforms.split(",")
    for cell, sides in [(cell, prepare(cell, platforms, candidates=options.candidates)) for cell in cells]:
        measure(cell, sides)


if __name__ == "__main__":
    main()
