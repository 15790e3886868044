"""Gather-reduce on a GPU: dispatch and combine of the experts of a layer, beside XLA and a copy.

    python benchmarks/gather_reduce/gather_reduce_gpu.py                  # the table
    python benchmarks/gather_reduce/gather_reduce_gpu.py --quick          # one layer, few rounds
    python benchmarks/gather_reduce/gather_reduce_gpu.py --candidates     # also every configuration worth measuring
    TRITON_INTERPRET=1 python benchmarks/gather_reduce/gather_reduce_gpu.py --check    # no times: small layers anywhere

All sides get the same bfloat16 rows and float32 weights; experts of a token are drawn at random. A side is timed only
if its output, and with gradients those of rows and weights, agree with XLA's in float32. Sides are interleaved, several
calls a sample, and medians are printed. The rate counts every row of both arrays once, with gradients also their
cotangents; so does that of the copy, which reads as much as it writes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import gather_reduce
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from segment_pooling.mean_pooling_gpu import numbers
from selective_scan.selective_scan_gpu import Side, compiled, error, medians

COLUMNS = ("layer", "call", "pass", "side", "ms", "rate")
OP = registry().ops["gather_reduce"]
Given = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Dispatch or combine of a layer, forward or with gradients."""

    tokens: int
    experts: int
    size: int
    top_k: int
    combines: bool = False
    gradients: bool = False

    def __str__(self) -> str:
        return f"T{self.tokens} E{self.experts} D{self.size} k{self.top_k}"

    def arguments(self) -> Given:
        """The operation's arguments."""
        pairs, keys = self.tokens * self.top_k, jax.random.split(jax.random.key(0), 3)
        chosen = jnp.argsort(jax.random.uniform(keys[0], (self.tokens, self.experts)), axis=1)[:, : self.top_k]
        order = jnp.argsort(chosen.reshape(-1), stable=True).astype(jnp.int32)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(pairs, dtype=jnp.int32)).reshape(-1, self.top_k)
        rows = jax.random.normal(keys[1], (pairs if self.combines else self.tokens, self.size)).astype(jnp.bfloat16)
        if self.combines:
            weights = jax.nn.softmax(jax.random.normal(keys[2], places.shape))
            return {"rows": rows, "indices": places, "inverse": order[:, None], "weights": weights}
        return {"rows": rows, "indices": order[:, None] // self.top_k, "inverse": places}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """What is measured: the layers of Qwen3-30B-A3B and of Mixtral."""
    layers = ((24, 4, 48, 2),) if options.check else ((8192, 128, 2048, 8), (16384, 8, 4096, 2))
    for tokens, experts, size, top_k in layers[: 1 if options.quick else None]:
        for combines in (False, True):
            for gradients in (False, True):
                shape = {"tokens": tokens, "experts": experts, "size": size, "top_k": top_k}
                yield Cell(**shape, combines=combines, gradients=gradients)


def call(platform: str) -> Callable[..., Any]:
    """(arguments, cotangent or None) -> sums, and with a cotangent the gradients of rows and weights."""

    def run(given: Given, cotangent: jax.Array | None) -> Any:
        floats = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def output(floats: Given) -> jax.Array:
            arrays: dict[str, Any] = {**given, **floats}
            return gather_reduce(**arrays, platform=platform)

        if cotangent is None:
            return (output(floats),)
        made, pull = jax.vjp(output, floats)
        return made, *jax.tree.leaves(pull(cotangent))

    return run


def configured(given: Given, cotangent: jax.Array | None) -> Iterator[tuple[str, Side]]:
    """The Triton kernels with every configuration worth measuring, the other pass with its default."""
    (kernel,) = (i for i in registry().implementations[OP.name] if i.name == "triton")
    record, device = OP.lower(OP.arguments(**given)), current_device()
    before = kernel.config.heuristic(record, device, "forward")
    for config in kernel.config.candidates(record, device, "forward" if cotangent is None else "backward"):

        def run(record: Any, cotangent: jax.Array | None, config: Any = config) -> Any:
            output, residuals = kernel.function("forward")(record, config if cotangent is None else before)
            if cotangent is None:
                return (output,)
            wanted = frozenset({"rows"} if record.weights is None else {"rows", "weights"})
            saved = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=wanted)
            made = kernel.function("backward")(saved, config)
            return output, *(made[name] for name in sorted(wanted))

        yield str(config), compiled(run, record, cotangent)


def timed(cell: Cell, options: argparse.Namespace) -> Iterator[list[str]]:
    """One line for each side that is right."""
    given = cell.arguments()
    output = jax.eval_shape(call("xla"), given, None)[0]
    cotangent = jax.random.normal(jax.random.key(2), output.shape).astype(output.dtype) if cell.gradients else None
    wide = given | {"rows": given["rows"].astype(jnp.float32)}
    want = numbers(jax.jit(call("xla"))(wide, None if cotangent is None else cotangent.astype(jnp.float32)))
    contenders = {f"ejkernel {name}": compiled(call(name), given, cotangent) for name in ("triton", "xla")}
    contenders |= dict(configured(given, cotangent)) if options.candidates or options.check else {}
    for name in list(contenders):
        off = error(numbers(contenders[name].run()), want)
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    words = [str(cell), "combine" if cell.combines else "dispatch", "with gradients" if cell.gradients else "forward"]
    if options.check:
        yield from ([*words, name, "right", ""] for name in contenders)
        return
    moved = 2.0 * (given["rows"].size + output.size) * (2 if cell.gradients else 1)
    moved += 2.0 * given["rows"].size if cell.gradients and cell.combines else 0.0
    source = jax.random.normal(jax.random.key(1), (int(moved) // 8,), jnp.float32)
    contenders["copy"] = compiled(lambda x: -x, source)
    for name, seconds in medians(contenders, 3 if options.quick else 7).items():
        yield [*words, name, f"{seconds * 1e3:.4f}", f"{moved / seconds / 1e9:.0f} GB/s"]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--quick": "one layer, few rounds",
            **shared.report.CANDIDATES_FLAG,
            "--check": "small layers on any device, no times",
        },
    )
    shared.report.print_rows_as_measured(COLUMNS, (row for cell in cells(options) for row in timed(cell, options)))


if __name__ == "__main__":
    main()
