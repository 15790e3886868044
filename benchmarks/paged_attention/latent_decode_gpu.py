"""Latent decoding on a GPU: `mla_decode`'s attention, dense and paged, absorbed, 512 + 64.

    python benchmarks/paged_attention/latent_decode_gpu.py                  # table
    python benchmarks/paged_attention/latent_decode_gpu.py --quick          # three shapes
    python benchmarks/paged_attention/latent_decode_gpu.py --candidates     # also every configuration worth measuring
    python benchmarks/paged_attention/latent_decode_gpu.py --only mosaic    # implementations with such a name

All sides get the same normal bfloat16 arrays and queries in the latent space; projections before and after are not
timed. A side is timed only if some rows agree with float64. Sides are interleaved, several calls a sample, and medians
are printed. The rate of bytes counts the latent vectors once, queries and outputs; that of operations, all products.
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

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules import multi_latent_ragged_page_attention
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("shape", "side", "ms", "GB/s", "TFLOP/s")
LATENT, ROTARY, LANES = 512, 64, 640
SCALE = 192**-0.5
Side = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """`rows` query tokens of each of `batch` sequences of `context` tokens, which they are the newest of."""

    batch: int = 128
    context: int = 4096
    heads: int = 128
    rows: int = 1
    page: int = 64

    def __str__(self) -> str:
        new = f", {self.rows} new" if self.rows > 1 else ""
        return f"B{self.batch} ctx {self.context} H{self.heads} page {self.page}{new}"

    @property
    def bytes(self) -> float:
        """Read and written, once each."""
        return 2.0 * self.batch * (self.context * (LATENT + ROTARY) + self.rows * self.heads * (2 * LATENT + ROTARY))

    @property
    def operations(self) -> float:
        """Of the pairs that attend."""
        pairs = self.rows * self.context - self.rows * (self.rows - 1) // 2
        return 2.0 * self.batch * self.heads * (2 * LATENT + ROTARY) * pairs

    def arrays(self) -> tuple[jax.Array, ...]:
        """Queries [T, H, 576], cache [P, S, 640], tables [N, K]."""
        columns = self.context // self.page
        keys = jax.random.split(jax.random.key(0), 2)
        query = jax.random.normal(keys[0], (self.batch * self.rows, self.heads, LATENT + ROTARY), jnp.bfloat16)
        cache = jax.random.normal(keys[1], (self.batch * columns, self.page, LANES), jnp.bfloat16)
        tables = np.random.default_rng(1).permutation(self.batch * columns).reshape(self.batch, columns)
        return query, cache, jnp.asarray(tables, jnp.int32)


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    yield Cell(heads=16)
    yield Cell()
    if quick:
        return
    yield Cell(batch=64, context=8192)
    yield Cell(batch=64, context=8192, heads=16)
    yield Cell(heads=32)
    yield Cell(heads=64)
    yield Cell(heads=16, page=16)
    yield Cell(batch=1, context=131072, heads=16)
    yield Cell(batch=1, context=8192, rows=2048)


def starts(cell: Cell) -> jax.Array:
    """First query row of each sequence."""
    return jnp.arange(cell.batch + 1, dtype=jnp.int32) * cell.rows


def paged(cell: Cell, arrays: tuple[jax.Array, ...], platform: str, config: Any = None) -> Side:
    """The operation, writing its tokens into the donated cache: the tokens that are there."""
    query, cache, tables = arrays
    full = jnp.full((cell.batch,), cell.context, jnp.int32)
    places = cell.context - cell.rows + jnp.arange(cell.rows)
    there = cache[tables[:, places // cell.page], places % cell.page].reshape(-1, LANES)
    shaped = cache.reshape(cache.shape[0], -1, 2, LANES)
    batch = full, tables.reshape(-1), starts(cell), jnp.array([0, 0, cell.batch], jnp.int32)
    given = (query[..., :LATENT], query[..., LATENT:], there[:, :LATENT], there[:, LATENT : LATENT + ROTARY])
    call = functools.partial(multi_latent_ragged_page_attention, softmax_scale=SCALE, platform=platform, cfg=config)
    step = jax.jit(call, donate_argnums=4).lower(*given, shaped, *batch).compile()
    held = [jnp.copy(shaped)]

    def run() -> jax.Array:
        output, held[0] = step(*given, held[0], *batch)
        return output

    return run


def record_of(cell: Cell, arrays: tuple[jax.Array, ...]) -> PagedAttention:
    """The record of a call that writes nothing."""
    query, cache, tables = arrays
    return PagedAttention(
        query=query,
        key_pages=cache,
        value_pages=None,
        block_tables=tables,
        kv_lens=jnp.full((cell.batch,), cell.context, jnp.int32),
        query_start=starts(cell) if cell.rows > 1 else None,
        softmax_scale=SCALE,
        kv_layout="psd",
        kv_heads=None,
        latent=(LATENT, LATENT),
    )


def dense_of(cell: Cell, arrays: tuple[jax.Array, ...]) -> TiledAttention:
    """The record that `mla_decode` makes of the same tokens in a dense cache."""
    query, cache, tables = arrays
    tokens = cache[tables].reshape(cell.batch, cell.context, 1, LANES)[..., : LATENT + ROTARY]
    return TiledAttention(
        query=query[:, None],
        key=tokens,
        value=tokens,
        softmax_scale=SCALE,
        q_segment_ids=jnp.zeros((cell.batch, 1), jnp.int32),
        kv_segment_ids=jnp.zeros((cell.batch, cell.context), jnp.int32),
    )


def configured(
    op: str, name: str, record: Any, read: Callable[[Any], jax.Array], every: bool
) -> Iterator[tuple[str, Side]]:
    """An implementation with the configuration of its heuristics, or with every one worth measuring.

    `read` picks what is compared. It is compiled with the call: sliced eagerly, a result costs the host 0.3 ms.
    """
    (implementation,) = (i for i in registry().implementations[op] if i.name == name)
    function = implementation.function("forward")
    device = current_device()
    configs = [implementation.config.heuristic(record, device, "forward")]
    if every:
        configs = list(dict.fromkeys(configs + list(implementation.config.candidates(record, device, "forward"))))
    for config in configs:
        run = jax.jit(lambda record, config=config: read(function(record, config)[0]))
        suffix = f" {config}" if every else ""
        yield suffix, functools.partial(run, record)


def copy(cell: Cell) -> Side:
    """A copy that moves as many bytes."""
    source = jax.random.normal(jax.random.key(1), (int(cell.bytes) // 8,), jnp.float32)
    compiled = jax.jit(lambda x: -x).lower(source).compile()
    return lambda: compiled(source)


def sides(cell: Cell, arrays: tuple[jax.Array, ...], options: argparse.Namespace) -> dict[str, Side]:
    """Everything that is timed on a cell."""
    found: dict[str, Side] = {}
    platforms = ("pallas", "triton") if cell.operations > 5e11 or not options.xla else ("pallas", "triton", "xla")
    for platform in platforms if not options.only else ():
        found[f"paged, {platform}, with writes"] = paged(cell, arrays, platform)
    op, record = "multi_latent_ragged_page_attention", record_of(cell, arrays)
    for name in (name for name in ("mosaic_gpu_latent", "triton") if options.only in name):
        for suffix, side in configured(op, name, record, lambda made: made[0], options.candidates):
            found[f"paged, {name}{suffix}"] = side
    if cell.rows > 1:
        return found
    record = dense_of(cell, arrays)

    def latent(output: jax.Array) -> jax.Array:
        """The columns that `mla_decode` reads of its record's output."""
        return output[:, 0, :, :LATENT]

    for name in (name for name in ("mosaic_gpu_latent", "triton_latent") if options.only in name):
        for suffix, side in configured("mla_decode", name, record, latent, options.candidates):
            found[f"dense, {name}{suffix}"] = side
    return found


def truth(cell: Cell, arrays: tuple[jax.Array, ...]) -> list[tuple[int, np.ndarray]]:
    """Query rows, and their output in float64."""
    query, cache, tables = arrays
    made = []
    for sequence in sorted({0, cell.batch - 1}):
        rows = np.asarray(cache[tables[sequence]].reshape(-1, LANES).astype(jnp.float32), np.float64)
        keys = rows[:, : LATENT + ROTARY]
        for i in sorted({0, cell.rows - 1}):
            end = cell.context - cell.rows + i + 1
            q = np.asarray(query[sequence * cell.rows + i].astype(jnp.float32), np.float64)
            scores = q @ keys[:end].T * SCALE
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            made.append((sequence * cell.rows + i, weights / weights.sum(-1, keepdims=True) @ keys[:end, :LATENT]))
    return made


def error(made: jax.Array, want: list[tuple[int, np.ndarray]]) -> float:
    """Largest relative error of a row."""
    got = [np.asarray(made[row].astype(jnp.float32)) for row, _ in want]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, (_, y) in zip(got, want, strict=True))


def timed(cell: Cell, options: argparse.Namespace) -> list[list[str]]:
    """One line for each side."""
    arrays = cell.arrays()
    want, contenders = truth(cell, arrays), sides(cell, arrays, options)
    for name in list(contenders):
        off = error(contenders[name](), want)
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    contenders["copy"] = copy(cell)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in shared.report.locked_rounds(3 if options.quick else 7):
        for name, side in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(side())
            calls = max(1, min(40, round(0.03 / (time.perf_counter() - start))))
            start = time.perf_counter()
            jax.block_until_ready([side() for _ in range(calls)][-1])
            times[name].append((time.perf_counter() - start) / calls)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        [str(cell), name, f"{s * 1e3:.3f}", f"{cell.bytes / s / 1e9:.0f}", f"{cell.operations / s / 1e12:.0f}"]
        for name, s in medians.items()
    ]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--quick": "two shapes, few rounds",
            **shared.report.CANDIDATES_FLAG,
            "--xla": "XLA, too, where it takes seconds at most",
        },
        {"--only": ("", "implementations with this in their name, without writes")},
    )
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in cells(options.quick) for row in timed(cell, options))
    )


if __name__ == "__main__":
    main()
