"""Mean pooling on a GPU: documents, chunks of them, rows and chunks of heads, beside XLA and a copy.

    python benchmarks/segment_pooling/mean_pooling_gpu.py  # the table
    python benchmarks/segment_pooling/mean_pooling_gpu.py --quick  # documents alone, few rounds
    python benchmarks/segment_pooling/mean_pooling_gpu.py --candidates  # also every configuration worth measuring
    TRITON_INTERPRET=1 python benchmarks/segment_pooling/mean_pooling_gpu.py --check  # no times: small shapes anywhere

All sides get the same bfloat16 values. A side is timed only if its output, and with gradients that of x, agree with
XLA's in float32. Sides are interleaved, several calls a sample, and medians are printed. The rate counts x and the
means once, with gradients also the means' cotangents and the gradient of x; so does that of the copy, which reads as
much as it writes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import mean_pooling
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from selective_scan.selective_scan_gpu import Side, compiled, error, medians

COLUMNS = ("shape", "pass", "side", "ms", "rate")
OP = registry().ops["mean_pooling"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One pooling, forward or with gradients; `documents` of uneven lengths are packed in one row."""

    shape: tuple[int, ...]
    documents: int = 0
    chunk_size: int | None = None
    gradients: bool = False

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape))]
        words += [f"{self.documents} documents"] if self.documents else []
        words += [f"chunks of {self.chunk_size}"] if self.chunk_size else []
        return ", ".join(words)

    def arguments(self) -> dict[str, jax.Array]:
        """x, and cumulative lengths of documents."""
        x = jax.random.normal(jax.random.key(0), self.shape, jnp.float32).astype(jnp.bfloat16)
        if not self.documents:
            return {"x": x}
        cuts = np.sort(np.random.default_rng(0).integers(0, self.shape[0], self.documents - 1))
        return {"x": x, "cu_seqlens": jnp.array([0, *cuts, self.shape[0]], jnp.int32)}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """What is measured."""
    tokens, rows, heads = (300, 40), (2, 70, 40), (2, 70, 2, 16)
    if not options.check:
        tokens, rows, heads = (65536, 2048), (8, 8192, 2048), (8, 8192, 16, 128)
    few, many = (5, 40) if options.check else (64, 4096)
    kinds: tuple[dict[str, Any], ...] = ({"shape": tokens, "documents": few},)
    if not options.quick:
        kinds += (
            {"shape": tokens, "documents": many},
            {"shape": tokens, "documents": few, "chunk_size": 32},
            {"shape": tokens, "documents": 1},
            {"shape": rows},
            {"shape": heads, "chunk_size": 32},
            {"shape": heads, "chunk_size": 1000},
        )
    for kind in kinds:
        yield Cell(**kind)
        yield Cell(**kind, gradients=True)


def call(cell: Cell, platform: str) -> Callable[..., Any]:
    """(x, cumulative lengths, cotangent or None) -> means, and with a cotangent the gradient of x."""

    def run(x: jax.Array, cuts: jax.Array | None, weights: jax.Array | None) -> Any:
        def output(x: jax.Array) -> jax.Array:
            return mean_pooling(x, cuts, chunk_size=cell.chunk_size, platform=platform)

        if weights is None:
            return (output(x),)
        made, pull = jax.vjp(output, x)
        return made, *pull(weights)

    return run


def configured(cell: Cell, given: dict[str, jax.Array], weights: jax.Array | None) -> Iterator[tuple[str, Side]]:
    """The Triton kernels with every configuration worth measuring, the other pass with its default."""
    (kernel,) = (i for i in registry().implementations[OP.name] if i.name == "triton")
    arguments = OP.arguments(**given, chunk_size=cell.chunk_size)
    record, device = OP.lower(arguments), current_device()
    before = kernel.config.heuristic(record, device, "forward")
    for config in kernel.config.candidates(record, device, "forward" if weights is None else "backward"):

        def run(record: Any, weights: jax.Array | None, config: Any = config) -> Any:
            output, residuals = kernel.function("forward")(record, before if weights is not None else config)
            means = OP.finish(arguments, output)
            if weights is None:
                return (means,)
            cotangent = weights.reshape(output.shape)
            wanted = frozenset({"values"})
            saved = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=wanted)
            return means, kernel.function("backward")(saved, config)["values"].reshape(given["x"].shape)

        yield str(config), compiled(run, record, weights)


def numbers(made: Any) -> list[np.ndarray]:
    """As float32, on the host."""
    return [np.asarray(x.astype(jnp.float32)) for x in made]


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side that is right."""
    given = cell.arguments()
    x, cuts = given["x"], given.get("cu_seqlens")
    shape = jax.eval_shape(call(cell, "xla"), x, cuts, None)[0].shape
    weights = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16) if cell.gradients else None
    want = jax.jit(call(cell, "xla"))(x.astype(jnp.float32), cuts, None if weights is None else weights.astype("f4"))
    contenders = {f"ejkernel {name}": compiled(call(cell, name), x, cuts, weights) for name in ("triton", "xla")}
    contenders |= dict(configured(cell, given, weights)) if options.candidates or options.check else {}
    for name in list(contenders):
        off = error(numbers(contenders[name].run()), numbers(want))
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    direction = "with gradients" if cell.gradients else "forward"
    if options.check:
        yield from ([str(cell), direction, name, "right", ""] for name in contenders)
        return
    moved = 2.0 * (x.size + np.prod(shape)) * (2 if cell.gradients else 1)
    source = jax.random.normal(jax.random.key(1), (int(moved) // 8,), jnp.float32)
    contenders["copy"] = compiled(lambda x: -x, source)
    for name, seconds in medians(contenders, 3 if options.quick else 7).items():
        yield [str(cell), direction, name, f"{seconds * 1e3:.4f}", f"{moved / seconds / 1e9:.0f} GB/s"]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--quick": "documents alone, few rounds",
            **shared.report.CANDIDATES_FLAG,
            "--check": "small shapes on any device, no times",
        },
    )
    shared.report.print_rows_as_measured(COLUMNS, (row for cell in cells(options) for row in timed(cell, options)))


if __name__ == "__main__":
    main()
