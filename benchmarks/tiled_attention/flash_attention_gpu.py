"""Flash attention on a GPU against whatever else is installed: forward, and forward with gradients, in TFLOP/s.

    python benchmarks/tiled_attention/flash_attention_gpu.py  # a table; some minutes
    python benchmarks/tiled_attention/flash_attention_gpu.py --quick  # two shapes
    # what dispatch chooses in 90 shapes: add --only auto
    python benchmarks/tiled_attention/flash_attention_gpu.py --grid
    # also results/flash_attention_gpu.md and .png
    python benchmarks/tiled_attention/flash_attention_gpu.py --output results

Peers, each where it is found: cuDNN through `jax.nn` and, for packed sequences, through what `jax.nn` calls, Tokamax,
and PyTorch's SDPA (flash and cuDNN) or, for calls that it cannot do, flex attention.
All get the same normal bfloat16 inputs. A side is timed only if its output and gradients agree with float32 on the
first KV head of the first row; sides take turns, and medians are printed. Only pairs that the mask leaves count, four
operations for each of the head's numbers, and 2.5 times as many for the gradients.
"""

import argparse
import contextlib
import dataclasses
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from filelock import FileLock

from ejkernel.modules import flash_attention
from ejkernel.ops import NoImplementationError

sys.path.append(str(Path(__file__).parents[1]))
import shared.processes
import shared.report
from shared.gpu_cells import Cell, documented_cells, grid
from shared.gpu_peers import peers

Arrays = tuple[jax.Array, ...]
Pass = Callable[[], Any]


def attention(cell: Cell, platform: str) -> Callable[..., jax.Array]:
    """Our call on a platform."""

    def call(q: Any, k: Any, v: Any, *cuts: Any) -> jax.Array:
        packed = cuts[0] if cuts else None
        sinks = jnp.ones((cell.heads, 1)) if cell.sinks else None
        return flash_attention(q, k, v, None, packed, None, sinks, platform=platform, **cell.options)

    return call


def compiled(call: Callable[..., Any], shapes: Arrays) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled forward pass, and the one with gradients, of a function of query, key, value and cuts."""
    q, k, v, _, *cuts = shapes
    forward = jax.jit(call).lower(q, k, v, *cuts).compile()
    return forward, jax.jit(functools.partial(graded, call)).lower(*shapes).compile()


def graded(call: Callable[..., Any], q: Any, k: Any, v: Any, cotangent: Any, *cuts: Any) -> tuple[Any, ...]:
    """Output and gradients."""
    output, pull = jax.vjp(lambda q, k, v: call(q, k, v, *cuts), q, k, v)
    return output, *pull(cotangent)


def wait(name: str, made: Any) -> None:
    """Returns when a side's work is done."""
    if name.startswith("torch"):
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(made)


def first_head(cell: Cell, x: Any, n: int) -> Any:
    """Of query, key, value or cotangent, the first KV head of the first row."""
    return x[:1, :, : cell.heads // cell.kv_heads if n in (0, 3) else 1]


def truth(cell: Cell, shapes: Arrays, call: Callable[[Cell, str], Any] = attention) -> Callable[..., Any]:
    """A compiled function of a cell's arrays: output and gradients of the first KV head, in float32."""

    first = dataclasses.replace(cell, heads=cell.heads // cell.kv_heads, kv_heads=1)

    def both(*arrays: Any) -> Any:
        parts = [first_head(cell, x, n).astype(jnp.float32) for n, x in enumerate(arrays[:4])]
        return graded(call(first, "xla"), *parts, *arrays[4:])

    with jax.default_matmul_precision("highest"):
        return jax.jit(both).lower(*shapes).compile(compiler_options={"xla_gpu_autotune_level": 0})


def error(cell: Cell, shapes: Arrays) -> Callable[..., Any]:
    """A compiled function of output and gradients, and of the truth: the largest relative error."""

    def largest(made: Any, want: Any) -> Any:
        parts = [first_head(cell, x, n).astype(jnp.float32) for x, n in zip(made, (0, 0, 1, 2), strict=True)]
        return jnp.stack([jnp.linalg.norm(x - y) / jnp.linalg.norm(y) for x, y in zip(parts, want, strict=True)]).max()

    made = shapes[3], *shapes[:3]

    def parts(*arrays: Any) -> tuple[Any, ...]:
        return tuple(first_head(cell, x, n).astype(jnp.float32) for x, n in zip(arrays, (0, 0, 1, 2), strict=True))

    return jax.jit(largest).lower(made, jax.eval_shape(parts, *made)).compile()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """All that a cell needs of JAX.

    Attributes:
        inputs: Makes the arrays.
        truth: Of the arrays.
        error: Of what a side made, and of the truth.
        sides: Both passes of JAX's sides; PyTorch's functions of arrays.
    """

    inputs: Callable[[], Any]
    truth: Callable[..., Any]
    error: Callable[..., Any]
    sides: dict[str, Any]


def compile_cell(cell: Cell, wanted: Callable[[str], bool]) -> Compiled:
    """Compiles a cell for the sides that are wanted and can do it."""
    shapes = tuple(jax.eval_shape(cell.inputs))
    calls = {f"ejkernel {platform}": attention(cell, platform) for platform in ("auto", "triton", "pallas", "cuda")}
    sides: dict[str, Any] = {}
    for name, call in (calls | peers(cell)).items():
        if wanted(name):
            with leaving_out(name, cell):
                sides[name] = call if "torch" in name else compiled(call, shapes)
    return Compiled(jax.jit(cell.inputs).lower().compile(), truth(cell, shapes), error(cell, shapes), sides)


@contextlib.contextmanager
def leaving_out(name: str, cell: Cell) -> Iterator[None]:
    """Goes on without a side that cannot do a cell."""
    try:
        yield
    except NoImplementationError:
        pass
    except Exception as problem:  # noqa: BLE001 - whatever a peer says when it cannot do a call
        print(f"<!-- {name} leaves out {cell}: {str(problem).splitlines()[0][:120]} -->", flush=True)


def correct_sides(cell: Cell, made: Compiled) -> dict[str, tuple[Pass, Pass]]:
    """Both passes, on a cell's arrays, of every side whose output and gradients are right."""
    arrays = made.inputs()
    q, k, v, _, *cuts = arrays
    want, found = made.truth(*arrays), {}
    for name, side in made.sides.items():
        with leaving_out(name, cell):
            if "torch" in name:
                passes = side(arrays[:4])
                results = [jnp.from_dlpack(x.detach().contiguous()) for x in passes[1]()]
            else:
                passes = functools.partial(side[0], q, k, v, *cuts), functools.partial(side[1], *arrays)
                results = passes[1]()
            off = float(made.error(tuple(results), want))
            if off < 2e-2:
                found[name] = passes
            else:
                print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
    return found


def timed(cell: Cell, made: Compiled) -> list[list[str]]:
    """One line for each side: forward, and forward with gradients."""
    return medians(cell, correct_sides(cell, made), 3.5)


def medians(cell: Cell, contenders: dict[str, tuple[Pass, Pass]], both: float) -> list[list[str]]:
    """One line for each of the sides, given the operations of both passes as a multiple of the forward pass's."""
    lines = {name: [str(cell), name] for name in contenders}
    for which, factor in ((0, 1.0), (1, both)):
        calls = {name: max(1, round(SAMPLE / seconds(name, pair[which], 1))) for name, pair in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(ROUNDS):
            for name in random.Random(f"{cell} {which} {turn}").sample(list(contenders), len(contenders)):
                times[name].append(seconds(name, contenders[name][which], calls[name]))
        for name, found in times.items():
            median = statistics.median(found)
            lines[name] += [f"{median * 1e3:.3f}", f"{factor * cell.forward_flops / median / 1e12:.0f}"]
    return list(lines.values())


def seconds(name: str, run: Pass, calls: int) -> float:
    """Of one call among several, one after the other, so that starting them costs nothing.

    As many go before, and sides come in another order every time: where a chip is at its limit of power, its clock is
    that of what ran before.
    """
    start = 0.0
    for _ in range(2):
        start, made = time.perf_counter(), None
        for _ in range(calls):
            made = run()
        wait(name, made)
    return (time.perf_counter() - start) / calls


def behind(rows: list[list[str]]) -> list[list[str]]:
    """Shapes in which what dispatch chooses is below 0.98 of the fastest peer, with both passes' ratios."""
    lines: list[list[str]] = []
    for shape in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[:2] == [shape, "ejkernel auto"]]
        others = [row for row in rows if row[0] == shape and not row[1].startswith("ejkernel")]
        if own and others:
            ratios = [min(float(row[n]) for row in others) / float(own[0][n]) for n in (2, 4)]
            if min(ratios) < 0.98:
                lines.append([shape, *(f"{ratio:.2f}" for ratio in ratios)])
    return lines


def costs(rows: list[list[str]]) -> list[list[str]]:
    """What features cost ejkernel: the time of a pair that attends over that of one in the plain call of that shape."""
    rates = {(row[0], row[1]): (float(row[3]), float(row[5])) for row in rows}
    lines: list[list[str]] = []
    for (shape, side), found in rates.items():
        plain = rates.get((shape.split(", ")[0], side))
        if side.startswith("ejkernel") and plain and plain is not found:
            lines.append([shape, side, *(f"{one / other - 1:+.0%}" for one, other in zip(plain, found, strict=True))])
    return lines


def versions() -> str:
    """Of what is compared and of what compiles it, where it is installed."""
    names = ("ejkernel-triton", "ejkernel-pallas", "ejkernel-cuda", "jax-triton", "triton", "torch", "tokamax")
    found: list[str] = []
    for name in (*names, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


SAMPLE = 0.03
"""Seconds."""
ROUNDS = 9
COLUMNS = ("shape", "side", "forward ms", "TFLOP/s", "forward + backward ms", "TFLOP/s")


def plot(rows: list[list[str]], path: Path) -> None:
    """Bars of forward + backward TFLOP/s, by shape and side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shapes, names = list(dict.fromkeys(row[0] for row in rows)), sorted({row[1] for row in rows})
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(9, 1 + 0.2 * len(shapes) * len(names)))
    for n, name in enumerate(names):
        found = [(shapes.index(row[0]) + n * height, float(row[5])) for row in rows if row[1] == name]
        axes.barh([y for y, _ in found], [x for _, x in found], height, label=name)
    axes.set_yticks([y + 0.4 for y in range(len(shapes))], shapes)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s, forward + backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def report(heading: str, rows: list[list[str]]) -> str:
    """The results as Markdown."""
    text = f"{heading}\n{shared.report.markdown_table(COLUMNS, rows)}\n"
    if slow := behind(rows):
        text += "\nWhat dispatch chooses is below 0.98 of the fastest peer in these, of all that were measured:\n\n"
        text += shared.report.markdown_table(("shape", "forward", "forward + backward"), slow) + "\n"
    if dear := costs(rows):
        text += "\nA pair that attends takes so much longer than in the plain call of the same shape:\n\n"
        text += shared.report.markdown_table(("shape", "side", "forward", "forward + backward"), dear) + "\n"
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Flash attention on a GPU against whatever else is installed.")
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--grid", action="store_true", help="head sizes by lengths by masks by heads, 90 shapes")
    parser.add_argument("--output", type=Path, help="folder for the table and a plot")
    for name, what in (("--only", "sides"), ("--shape", "shapes")):
        parser.add_argument(
            name, action="append", default=[], metavar="WORD", help=f"{what} whose name has it; repeatable"
        )
    parser.add_argument("--processes", type=int, default=1, help="that compile; only one at a time uses the GPU")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(options: argparse.Namespace, cells: list[Cell]) -> Iterator[list[str]]:
    """The lines of cells, in this process."""
    lock = FileLock(options.lock) if options.lock else contextlib.nullcontext()
    for cell in cells:
        made = compile_cell(cell, functools.partial(among, options.only))
        with lock:
            yield from timed(cell, made)


def gathered(processes: int) -> Iterator[list[str]]:
    """The lines of all cells, from processes that each have a part of them."""
    for line in shared.processes.lines_of_processes(processes):
        if line.startswith("| B"):
            yield line.strip("| \n").split(" | ")
        else:
            print(line, end="", flush=True)


def among(words: list[str], name: str) -> bool:
    return not words or any(word in name for word in words)


def main() -> None:
    options = arguments()
    cells = [
        cell
        for cell in (grid() if options.grid else documented_cells(options.quick))
        if among(options.shape, str(cell))
    ]
    if options.part is not None:
        for row in measured(options, cells[options.part :: options.processes]):
            print("| " + " | ".join(row) + " |", flush=True)
        return
    if not shared.report.has_gpu():
        return
    heading = f"{shared.report.heading()}\n{versions()}\n"
    print(heading)
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    name, rows, order = "flash_attention_gpu" + ("_grid" if options.grid else ""), [], [str(cell) for cell in cells]
    for row in gathered(options.processes) if options.processes > 1 else measured(options, cells):
        print("| " + " | ".join(row) + " |", flush=True)
        rows = sorted([*rows, row], key=lambda row: order.index(row[0]))
        if options.output:  # anew after each line, so that an interrupted run leaves what it measured
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"{name}.md").write_text(report(heading, rows))
    if options.output and not options.grid:
        plot(rows, options.output / f"{name}.png")
    if slow := behind(rows):
        print("\n" + shared.report.markdown_table(("behind a peer", "forward", "forward + backward"), slow))


if __name__ == "__main__":
    main()
