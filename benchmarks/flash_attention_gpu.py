"""Flash attention on a GPU against whatever else is installed: forward, and forward with gradients, in TFLOP/s.

    python benchmarks/flash_attention_gpu.py                    # a table; some minutes
    python benchmarks/flash_attention_gpu.py --quick            # two shapes
    python benchmarks/flash_attention_gpu.py --output results   # also results/flash_attention_gpu.md and .png

Peers, each where it is found: cuDNN through `jax.nn`, Tokamax, and PyTorch's SDPA (flash and cuDNN) or, for calls that
it cannot do, flex attention.
All get the same normal bfloat16 inputs. A side is timed only if its output and gradients agree with float32 on the
first KV head of the first row; sides take turns, and medians are printed. Only pairs that the mask leaves count, four
operations for each of the head's numbers, and 2.5 times as many for the gradients.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import _report
import jax
import jax.numpy as jnp
import numpy as np
from _gpu_peers import peers

from ejkernel.modules import flash_attention
from ejkernel.ops import NoImplementationError

Arrays = tuple[jax.Array, ...]
Pass = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape and mask; the tokens are 32768 in all."""

    length: int = 8192
    heads: int = 16
    kv_heads: int = 16
    size: int = 128
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    packed: int | None = None
    dropout: float = 0.0

    @property
    def batch(self) -> int:
        return 32768 // self.length

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        mask += f", window {self.window}" if self.window else ""
        mask += f", cap {self.cap:g}" if self.cap else ""
        mask += f", {self.packed} packed" if self.packed else ""
        mask += f", dropout {self.dropout:g}" if self.dropout else ""
        return f"B{self.batch} S{self.length} H{self.heads}/{self.kv_heads} D{self.size} {mask}"

    @functools.cached_property
    def cuts(self) -> np.ndarray | None:
        """Cumulative lengths of packed sequences, uneven."""
        if self.packed is None:
            return None
        inner = np.random.default_rng(0).choice(np.arange(1, self.length), self.packed - 1, replace=False)
        return np.concatenate([[0], np.sort(inner), [self.length]]).astype(np.int32)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `flash_attention`."""
        window = {"sliding_window": (self.window - 1, 0)} if self.window else {}
        dropout = {"dropout_prob": self.dropout, "dropout_seed": 1} if self.dropout else {}
        return {"causal": self.causal, "logits_soft_cap": self.cap, **window, **dropout}

    @property
    def operations(self) -> float:
        """Of a forward pass."""
        lengths = [self.length] if self.cuts is None else np.diff(self.cuts)
        seen = sum(self._pairs(int(n)) for n in lengths)
        return 4.0 * self.batch * self.heads * self.size * seen

    def _pairs(self, n: int) -> int:
        if not self.causal:
            return n * n
        window = min(self.window or n, n)
        return window * (window + 1) // 2 + (n - window) * window

    def inputs(self) -> Arrays:
        """Query, key, value and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.length, h, self.size) for h in heads]
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    yield Cell(causal=False)
    yield Cell()
    if quick:
        return
    yield Cell(heads=32, kv_heads=8)
    yield Cell(window=1024)
    yield Cell(cap=30.0)
    yield Cell(dropout=0.1)
    yield Cell(length=32768, packed=22)
    yield Cell(length=32768)
    yield Cell(length=32768, window=1024)
    yield Cell(length=2048)
    for causal in (False, True):
        yield Cell(heads=32, kv_heads=32, size=64, causal=causal)
        yield Cell(heads=8, kv_heads=8, size=256, causal=causal)


def attention(cell: Cell, platform: str) -> Callable[..., jax.Array]:
    """Our call on a platform."""
    cuts = () if cell.cuts is None else (None, jnp.asarray(cell.cuts))
    return lambda q, k, v: flash_attention(q, k, v, *cuts, platform=platform, **cell.options)


def passes(call: Callable[..., Any], arrays: Arrays) -> tuple[Pass, Pass]:
    """The compiled forward pass, and the one with gradients, of a function of query, key and value."""
    q, k, v, _ = arrays

    def graded(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(call, q, k, v)
        return output, *pull(cotangent)

    forward, both = jax.jit(call).lower(q, k, v).compile(), jax.jit(graded).lower(*arrays).compile()
    return lambda: forward(q, k, v), lambda: both(*arrays)


def wait(name: str, made: Any) -> None:
    """Returns when a side's work is done."""
    if name.startswith("torch"):
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(made)


def sides(cell: Cell, arrays: Arrays, wanted: Callable[[str], bool]) -> dict[str, tuple[Pass, Pass]]:
    """Everything that can compute a cell here, of what is wanted; JAX's sides are compiled at the same time."""
    calls = {f"ejkernel {platform}": attention(cell, platform) for platform in ("auto", "triton", "pallas", "cuda")}
    calls = {name: call for name, call in (calls | peers(cell)).items() if wanted(name)}
    found: dict[str, tuple[Pass, Pass]] = {}
    with ThreadPoolExecutor() as pool:
        compiling = {name: pool.submit(passes, call, arrays) for name, call in calls.items() if "torch" not in name}
        for name, call in calls.items():
            try:
                found[name] = compiling[name].result() if name in compiling else call(arrays)
            except NoImplementationError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever a peer says when it cannot do a call
                print(f"<!-- {name} leaves out {cell}: {str(error).splitlines()[0][:120]} -->", flush=True)
    return found


def truth(cell: Cell, arrays: Arrays) -> list[np.ndarray]:
    """Output and gradients of the first KV head of the first row, in float32."""
    group = cell.heads // cell.kv_heads
    part = [x[:1, :, : group if n in (0, 3) else 1].astype(jnp.float32) for n, x in enumerate(arrays)]
    with jax.default_matmul_precision("highest"):
        _, both = passes(attention(cell, "xla"), tuple(part))
        return [np.asarray(x) for x in both()]


def error(got: Any, want: list[np.ndarray]) -> float:
    """The largest relative error among output and gradients."""
    errors = []
    for x, y in zip(got, want, strict=True):
        own = x[:1, :, : y.shape[2]]
        own = np.asarray(own.astype(jnp.float32)) if isinstance(own, jax.Array) else own.detach().float().cpu().numpy()
        errors.append(float(np.linalg.norm(own - y) / np.linalg.norm(y)))
    return max(errors)


def timed(cell: Cell, rounds: int, wanted: Callable[[str], bool]) -> list[list[str]]:
    """One line for each side: forward, and forward with gradients."""
    arrays = cell.inputs()
    want, contenders = truth(cell, arrays), sides(cell, arrays, wanted)
    for name in list(contenders):
        off = error(contenders[name][1](), want)
        if not off < 2e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    lines = {name: [str(cell), name] for name in contenders}
    made: Any = None
    for which, factor in ((0, 1.0), (1, 3.5)):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, pair in contenders.items():
                wait(name, pair[which]())
                start = time.perf_counter()
                for _ in range(CALLS):  # one after the other, so that starting them costs nothing
                    made = pair[which]()
                wait(name, made)
                times[name].append((time.perf_counter() - start) / CALLS)
        for name, seconds in times.items():
            median = statistics.median(seconds)
            lines[name] += [f"{median * 1e3:.3f}", f"{factor * cell.operations / median / 1e12:.0f}"]
    return list(lines.values())


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


CALLS = 5
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--output", type=Path, help="folder for the table and a plot")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="sides whose name has it; repeatable"
    )
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("flash_attention_gpu.py needs a GPU: nothing was measured")
        return
    heading = f"{_report.heading()}\n{versions()}\n"
    print(heading)
    print(_report.markdown_table(COLUMNS, ()), flush=True)
    rows: list[list[str]] = []

    def wanted(name: str) -> bool:
        return not options.only or any(word in name for word in options.only)

    for cell in cells(options.quick):
        rows += timed(cell, 7, wanted)
        print("\n".join("| " + " | ".join(row) + " |" for row in rows if row[0] == str(cell)), flush=True)
        if options.output:  # anew after each shape, so that an interrupted run leaves those that it finished
            options.output.mkdir(parents=True, exist_ok=True)
            text = f"{heading}\n{_report.markdown_table(COLUMNS, rows)}\n"
            (options.output / "flash_attention_gpu.md").write_text(text)
            plot(rows, options.output / "flash_attention_gpu.png")


if __name__ == "__main__":
    main()
