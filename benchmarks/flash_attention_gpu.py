"""Flash attention on a GPU against whatever else is installed: forward, and forward with gradients, in TFLOP/s.

    python benchmarks/flash_attention_gpu.py                    # a table; some minutes
    python benchmarks/flash_attention_gpu.py --quick            # two shapes
    python benchmarks/flash_attention_gpu.py --grid             # what dispatch chooses in 90 shapes: add --only auto
    python benchmarks/flash_attention_gpu.py --output results   # also results/flash_attention_gpu.md and .png

Peers, each where it is found: cuDNN through `jax.nn` and, for packed sequences, through what `jax.nn` calls, Tokamax,
and PyTorch's SDPA (flash and cuDNN) or, for calls that it cannot do, flex attention.
All get the same normal bfloat16 inputs. A side is timed only if its output and gradients agree with float32 on the
first KV head of the first row; sides take turns, and medians are printed. Only pairs that the mask leaves count, four
operations for each of the head's numbers, and 2.5 times as many for the gradients.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import _report
import jax
import jax.numpy as jnp
import numpy as np
from _gpu_cells import Cell, grid, headlines
from _gpu_peers import peers

from ejkernel.modules import flash_attention
from ejkernel.ops import NoImplementationError

Arrays = tuple[jax.Array, ...]
Pass = Callable[[], Any]
Sides = dict[str, Future[Any]]


def attention(cell: Cell, platform: str) -> Callable[..., jax.Array]:
    """Our call on a platform."""
    cuts = () if cell.cuts is None else (None, jnp.asarray(cell.cuts))
    return lambda q, k, v: flash_attention(q, k, v, *cuts, platform=platform, **cell.options)


def compiled(call: Callable[..., Any], shapes: Arrays) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The compiled forward pass, and the one with gradients, of a function of query, key and value."""

    def graded(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(call, q, k, v)
        return output, *pull(cotangent)

    return jax.jit(call).lower(*shapes[:3]).compile(), jax.jit(graded).lower(*shapes).compile()


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


def compiling(cell: Cell, pool: ThreadPoolExecutor, wanted: Callable[[str], bool]) -> Sides:
    """Starts to compile a cell's truth, in float32 and for one head, and its sides that are wanted, but PyTorch's."""
    shapes = tuple(jax.eval_shape(cell.inputs))
    part = jax.eval_shape(lambda *xs: [first_head(cell, x, n).astype(jnp.float32) for n, x in enumerate(xs)], *shapes)
    calls = {f"ejkernel {platform}": attention(cell, platform) for platform in ("auto", "triton", "pallas", "cuda")}
    calls = {name: call for name, call in (calls | peers(cell)).items() if wanted(name)}

    def truth() -> Any:
        with jax.default_matmul_precision("highest"):
            return compiled(attention(cell, "xla"), tuple(part))

    found: Sides = {"truth": pool.submit(truth)}
    for name, call in calls.items():
        found[name] = Future() if "torch" in name else pool.submit(compiled, call, shapes)
        if "torch" in name:
            found[name].set_result(call)
    return found


def bound(made: tuple[Callable[..., Any], Callable[..., Any]], arrays: Arrays) -> tuple[Pass, Pass]:
    """Compiled passes on arrays."""
    return functools.partial(made[0], *arrays[:3]), functools.partial(made[1], *arrays)


def sides(cell: Cell, arrays: Arrays, futures: Sides) -> dict[str, tuple[Pass, Pass]]:
    """Both passes of every side that can do a cell, on its arrays."""
    found: dict[str, tuple[Pass, Pass]] = {}
    for name, future in futures.items():
        try:
            made = future.result()
            found[name] = made(arrays) if "torch" in name else bound(made, arrays)
        except NoImplementationError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever a peer says when it cannot do a call
            print(f"<!-- {name} leaves out {cell}: {str(error).splitlines()[0][:120]} -->", flush=True)
    return found


def error(got: Any, want: list[np.ndarray]) -> float:
    """The largest relative error among output and gradients."""
    errors = []
    for x, y in zip(got, want, strict=True):
        own = x[:1, :, : y.shape[2]]
        own = np.asarray(own.astype(jnp.float32)) if isinstance(own, jax.Array) else own.detach().float().cpu().numpy()
        errors.append(float(np.linalg.norm(own - y) / np.linalg.norm(y)))
    return max(errors)


def timed(cell: Cell, rounds: int, futures: Sides) -> list[list[str]]:
    """One line for each side: forward, and forward with gradients."""
    arrays = cell.inputs()
    part = [first_head(cell, x, n).astype(jnp.float32) for n, x in enumerate(arrays)]
    want = [np.asarray(x) for x in futures.pop("truth").result()[1](*part)]
    contenders = sides(cell, arrays, futures)
    for name in list(contenders):
        off = error(contenders[name][1](), want)
        if not off < 2e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    lines = {name: [str(cell), name] for name in contenders}
    for which, factor in ((0, 1.0), (1, 3.5)):
        calls = {name: max(1, round(SAMPLE / seconds(name, pair[which], 1))) for name, pair in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, pair in contenders.items():
                times[name].append(seconds(name, pair[which], calls[name]))
        for name, found in times.items():
            median = statistics.median(found)
            lines[name] += [f"{median * 1e3:.3f}", f"{factor * cell.operations / median / 1e12:.0f}"]
    return list(lines.values())


def seconds(name: str, run: Pass, calls: int) -> float:
    """Of one call among several, one after the other, so that starting them costs nothing."""
    made = run()
    wait(name, made)
    start = time.perf_counter()
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


SAMPLE = 0.015
"""Seconds."""
ROUNDS = 5
BATCH = 12
"""Cells that are compiled at the same time, before any of them is timed."""
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
    text = f"{heading}\n{_report.markdown_table(COLUMNS, rows)}\n"
    if slow := behind(rows):
        text += "\nWhat dispatch chooses is below 0.98 of the fastest peer in these, of all that were measured:\n\n"
        text += _report.markdown_table(("shape", "forward", "forward + backward"), slow) + "\n"
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--grid", action="store_true", help="head sizes by lengths by masks by heads, 90 shapes")
    parser.add_argument("--output", type=Path, help="folder for the table and a plot")
    for name, what in (("--only", "sides"), ("--shape", "shapes")):
        parser.add_argument(
            name, action="append", default=[], metavar="WORD", help=f"{what} whose name has it; repeatable"
        )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if jax.default_backend() != "gpu":
        print("flash_attention_gpu.py needs a GPU: nothing was measured")
        return
    heading = f"{_report.heading()}\n{versions()}\n"
    print(heading)
    print(_report.markdown_table(COLUMNS, ()), flush=True)
    rows: list[list[str]] = []

    def among(words: list[str], name: str) -> bool:
        return not words or any(word in name for word in words)

    cells = [cell for cell in (grid() if options.grid else headlines(options.quick)) if among(options.shape, str(cell))]
    name = "flash_attention_gpu_grid" if options.grid else "flash_attention_gpu"
    for start in range(0, len(cells), BATCH):
        batch = cells[start : start + BATCH]
        with ThreadPoolExecutor() as pool:
            futures = [compiling(cell, pool, lambda side: among(options.only, side)) for cell in batch]
        for cell, sides_of in zip(batch, futures, strict=True):
            rows += timed(cell, ROUNDS, sides_of)
            print("\n".join("| " + " | ".join(row) + " |" for row in rows if row[0] == str(cell)), flush=True)
            if options.output:  # anew after each shape, so that an interrupted run leaves those that it finished
                options.output.mkdir(parents=True, exist_ok=True)
                (options.output / f"{name}.md").write_text(report(heading, rows))
        if options.output and not options.grid:
            plot(rows, options.output / f"{name}.png")
    if slow := behind(rows):
        print("\n" + _report.markdown_table(("behind a peer", "forward", "forward + backward"), slow))


if __name__ == "__main__":
    main()
