"""Decoding over a dense cache on a GPU: `ragged_decode_attention` against PyTorch's SDPA and the device's own copy.

    python benchmarks/paged_attention/ragged_decode_gpu.py           # a table
    python benchmarks/paged_attention/ragged_decode_gpu.py --quick   # two shapes
    python benchmarks/paged_attention/ragged_decode_gpu.py --splits  # also every number of splits worth measuring

All sides get the same normal bfloat16 arrays. A side is timed only if its output agrees with float32 on the first rows;
sides take turns, several calls a turn, and medians are printed. The rate counts each key and value that is attended
once, and the queries and outputs; that of the copy, what it reads and writes.
"""

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

from ejkernel.modules import ragged_decode_attention
from ejkernel.modules.operations.configs import RaggedDecodeAttentionConfig
from ejkernel.ops import FwdParams, NoImplementationError

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

CALLS = 40
COLUMNS = ("shape", "side", "ms", "GB/s")
Side = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape; with `ragged`, rows have uneven lengths up to the capacity."""

    batch: int = 64
    length: int = 8192
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    ragged: bool = False

    def __str__(self) -> str:
        shape = f"B{self.batch} S{self.length} H{self.heads}/{self.kv_heads} D{self.size}"
        return f"{shape}, uneven lengths" if self.ragged else shape

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Keys of each row."""
        if not self.ragged:
            return np.full(self.batch, self.length, np.int32)
        return np.random.default_rng(0).integers(self.length // 8, self.length + 1, self.batch, dtype=np.int32)

    @property
    def bytes(self) -> float:
        """Read and written, once each."""
        return 4.0 * self.size * (int(self.ends.sum()) * self.kv_heads + self.batch * self.heads)

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, keys, values, and where the ranges start and end."""
        shapes = ((self.batch, self.heads, self.size), *[(self.batch, self.length, self.kv_heads, self.size)] * 2)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        made = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        return (*made, jnp.zeros(self.batch, jnp.int32), jnp.asarray(self.ends))


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    yield Cell()
    yield Cell(size=64)
    if quick:
        return
    yield Cell(size=256, batch=32)
    yield Cell(batch=256, length=2048)
    yield Cell(length=2048)
    yield Cell(batch=16, length=32768)
    yield Cell(batch=1, length=131072)
    yield Cell(heads=8)
    yield Cell(heads=32, kv_heads=1, length=32768)
    yield Cell(ragged=True)


def ours(arrays: tuple[jax.Array, ...], platform: str, splits: int | None = None) -> Side:
    """The library."""
    cfg = RaggedDecodeAttentionConfig(fwd_params=FwdParams(num_key_splits=splits)) if splits else None

    def run(*arrays: jax.Array) -> jax.Array:
        return ragged_decode_attention(*arrays, platform=platform, cfg=cfg)

    compiled = jax.jit(run).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def torch_sdpa(arrays: tuple[jax.Array, ...]) -> Side:
    """PyTorch's, which takes no lengths: for full rows alone."""
    import torch

    query, keys, values = (torch.from_dlpack(x) for x in arrays[:3])
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def copy(cell: Cell) -> Side:
    """A copy that moves as many bytes."""
    source = jax.random.normal(jax.random.key(1), (int(cell.bytes) // 8,), jnp.float32)
    compiled = jax.jit(lambda x: -x).lower(source).compile()
    return lambda: compiled(source)


def sides(cell: Cell, arrays: tuple[jax.Array, ...], splits: bool) -> dict[str, Side]:
    """Everything that can compute a cell here."""
    found: dict[str, Side] = {}
    for platform in ("cuda", "triton", "pallas", "xla"):
        try:
            found[f"ejkernel {platform}"] = ours(arrays, platform)
        except NoImplementationError:
            continue
    if splits and "ejkernel cuda" in found:
        found |= {f"ejkernel cuda, {n} splits": ours(arrays, "cuda", n) for n in (1, 2, 4, 8, 16)}
    if not cell.ragged:
        try:
            found["torch SDPA"] = torch_sdpa(arrays)
            found["torch SDPA"]()
        except Exception as error:  # noqa: BLE001 - whatever a peer says when it cannot do a call
            found.pop("torch SDPA", None)
            print(f"<!-- torch SDPA leaves out {cell}: {str(error).splitlines()[0][:120]} -->", flush=True)
    return found


def truth(arrays: tuple[jax.Array, ...]) -> np.ndarray:
    """Output of the first row and KV head in float64."""
    query, keys, values = (np.asarray(x[0].astype(jnp.float32), np.float64) for x in arrays[:3])
    end, group = int(arrays[4][0]), query.shape[0] // keys.shape[1]
    scores = query[:group] @ keys[:end, 0].T * query.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values[:end, 0]


def wait(made: Any) -> None:
    """Returns when a side's work is done."""
    if isinstance(made, jax.Array):
        made.block_until_ready()
    else:
        import torch

        torch.cuda.synchronize()


def error(made: Any, want: np.ndarray) -> float:
    """Relative error of the first KV head of the first row."""
    own = made[0, : len(want)]
    own = np.asarray(own.astype(jnp.float32)) if isinstance(own, jax.Array) else own.float().cpu().numpy()
    return float(np.linalg.norm(own - want) / np.linalg.norm(want))


def timed(cell: Cell, rounds: int, splits: bool) -> list[list[str]]:
    """One line for each side."""
    arrays = cell.inputs()
    want, contenders = truth(arrays), sides(cell, arrays, splits)
    for name in list(contenders):
        off = error(contenders[name](), want)
        if not off < 2e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    contenders["copy"] = copy(cell)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in shared.report.locked_rounds(rounds):
        for name, side in contenders.items():
            wait(side())
            start = time.perf_counter()
            made = [side() for _ in range(CALLS)][-1]  # one after the other, so that starting them costs nothing
            wait(made)
            times[name].append((time.perf_counter() - start) / CALLS)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [[str(cell), name, f"{s * 1e3:.3f}", f"{cell.bytes / s / 1e9:.0f}"] for name, s in medians.items()]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__, {"--quick": "two shapes, few rounds", "--splits": "other numbers of splits, too"}
    )
    rounds = 5 if options.quick else 9
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in cells(options.quick) for row in timed(cell, rounds, options.splits))
    )


if __name__ == "__main__":
    main()
