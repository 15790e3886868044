"""Paged attention on a GPU: decoding, prefill and mixed batches over caches in pages.

    python benchmarks/paged_attention/paged_attention_gpu.py                  # tables
    python benchmarks/paged_attention/paged_attention_gpu.py --quick          # two shapes of each
    python benchmarks/paged_attention/paged_attention_gpu.py --candidates     # also every configuration worth measuring
    python benchmarks/paged_attention/paged_attention_gpu.py --cells 10:14    # a part of the shapes

All sides get the same normal bfloat16 arrays; the pages of a sequence are spread over the cache at random. A side is
timed only if its output agrees with float64 on a few query rows. Sides are interleaved, calls of 25 ms a sample, and
medians are printed. Decoding's rate counts each key and value once, and queries and outputs; that of the copy, what it
reads and writes. The rate of prefill counts the products of pairs that attend. Beside these stand flash attention and
`ragged_decode_attention` of the same keys and values as dense arrays, FlashInfer where it is installed, and a mixed
batch as two calls, one after the other. Short calls take longer to start than to run: those of several layers are in
one program, whose time is divided by their number.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, ragged_decode_attention, unified_attention
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from paged_attention import _paged_peers
from shared.turns import TimedCall, time_in_turns

COLUMNS = ("shape", "side", "ms", "rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One batch: `rows` query tokens of each of `batch` sequences that have `context` tokens, the queries included."""

    batch: int = 64
    context: int = 8192
    rows: int = 1
    page: int = 64
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    ragged: bool = False
    decoding: int = 0
    prefix: int = 0
    tree: bool = False
    cache: str = "bfloat16"
    others: int = 0
    """Tokens of all sequences but one, where they are fewer."""
    layers: int = 1
    """Calls of a program, each with pages of its own, and queries that the call before made."""

    def __str__(self) -> str:
        shape = f"B{self.batch} ctx {self.context} H{self.heads}/{self.kv_heads} D{self.size} page {self.page}"
        shape += f", {self.rows} new" if self.rows > 1 else ""
        shape += f", {self.decoding} decoding" if self.decoding else ""
        shape += f", {self.prefix} shared" if self.prefix else ""
        shape += " of a tree" if self.tree else ""
        shape += f", {self.cache} cache" if self.cache != "bfloat16" else ""
        shape += f", the others {self.others}" if self.others else ""
        shape += f", {self.layers} layers" if self.layers > 1 else ""
        return f"{shape}, lengths 1 to {self.context}" if self.ragged else shape

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        if self.ragged:
            return np.random.default_rng(0).integers(1, self.context + 1, self.batch, dtype=np.int32)
        lengths = np.full(self.batch + self.decoding, self.others or self.context, np.int32)
        lengths[self.batch // 2] = self.context
        return lengths

    @functools.cached_property
    def queries(self) -> np.ndarray:
        """Query rows of each sequence."""
        return np.array([self.rows] * self.batch + [1] * self.decoding, np.int32)

    @property
    def bytes(self) -> float:
        """Read and written, once each."""
        kept = int(self.lengths.sum()) * self.kv_heads * 2 * jnp.dtype(self.cache).itemsize
        return float(self.size * (kept + int(self.queries.sum()) * self.heads * 2 * 2))

    @property
    def operations(self) -> float:
        """Of the pairs that attend."""
        pairs = sum(
            int(n) * int(q) - int(q) * (int(q) - 1) // 2 for n, q in zip(self.lengths, self.queries, strict=True)
        )
        return 4.0 * self.heads * self.size * pairs

    def rate(self, seconds: float) -> str:
        """What decoding reads a second, or what prefill computes."""
        if self.rows == 1:
            return f"{self.bytes / seconds / 1e9:.0f} GB/s"
        return f"{self.operations / seconds / 1e12:.0f} TFLOP/s"

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """bool [rows, rows]: the new tokens that each attends to: itself and those above it in a binary tree."""
        allowed = np.eye(self.rows, dtype=bool)
        for row in range(1, self.rows):
            allowed[row] |= allowed[(row - 1) // 2]
        return allowed

    def options(self) -> dict[str, Any]:
        """Further arguments of the operation."""
        options: dict[str, Any] = {"shared_prefix": np.int32(self.prefix)} if self.prefix else {}
        bias = np.where(self.ancestors, 0, -np.inf).astype(np.float32)
        return options | ({"qq_bias": jnp.asarray(bias)} if self.tree else {})

    def inputs(self) -> tuple[jax.Array, ...]:
        """Queries, key cache, value cache, lengths, tables and starts of the queries, as `unified_attention` takes."""
        sequences, columns = len(self.lengths), -(-self.context // self.page)
        shapes = [
            (int(self.queries.sum()), self.heads, self.size),
            *[(self.layers * sequences * columns, self.page, self.kv_heads, self.size)] * 2,
        ]
        keys = jax.random.split(jax.random.key(0), 3)
        made = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        made = [made[0], *(x.astype(self.cache) for x in made[1:])]
        tables = np.random.default_rng(1).permutation(sequences * columns).reshape(sequences, columns)
        tables[:, : self.prefix // self.page] = tables[:1, : self.prefix // self.page]
        starts = np.concatenate([[0], np.cumsum(self.queries)])
        return (*made, *(jnp.asarray(x, jnp.int32) for x in (self.lengths, tables, starts)))


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    yield Cell()
    yield Cell(batch=8, rows=512)
    if quick:
        return
    yield Cell(page=16)
    yield Cell(page=128)
    yield Cell(batch=256, context=2048)
    yield Cell(batch=64, context=2048)
    yield Cell(batch=64, context=32768)
    yield Cell(batch=256, context=8192)
    yield Cell(batch=64, context=16384, ragged=True)
    yield Cell(batch=1)
    yield Cell(batch=8)
    yield Cell(batch=1, context=131072)
    yield Cell(batch=8, rows=2048)
    yield Cell(batch=4, rows=512, decoding=60)
    yield Cell(prefix=7168)
    yield Cell(batch=256, context=2048, prefix=1024)
    yield Cell(rows=8)
    yield Cell(rows=8, tree=True)
    yield Cell(cache="float8_e4m3fn")
    yield Cell(cache="float8_e4m3fn", page=16)
    yield Cell(cache="float8_e4m3fn", context=2048)
    yield Cell(cache="float8_e4m3fn", context=16384, ragged=True)
    yield Cell(cache="float8_e5m2")
    yield Cell(context=32768, others=1024)
    yield Cell(cache="float8_e4m3fn", context=32768, others=1024)
    yield Cell(batch=1, layers=16)
    yield Cell(batch=8, layers=4)
    yield Cell(batch=1, context=131072, layers=4)
    yield Cell(batch=8, context=131072)


def chained(step: Callable[..., jax.Array], query: jax.Array, layers: list[Any]) -> Any:
    """Queries through a call for each layer: what the first layer makes and, where there are more, the last one."""
    made = [query]
    for layer in layers:
        made.append(step(made[-1], layer))
    return made[1] if len(layers) == 1 else (made[1], made[-1])


def ours(arrays: tuple[jax.Array, ...], platform: str, options: dict[str, Any], layers: int = 1) -> TimedCall:
    """The operation, as users call it."""
    query, keys, values, lengths, tables, starts = arrays
    every = [tables + n * (keys.shape[0] // layers) for n in range(layers)]

    def run(query: jax.Array, every: list[jax.Array], *rest: jax.Array, **options: Any) -> Any:
        keys, values, lengths, starts = rest

        def step(query: jax.Array, tables: jax.Array) -> jax.Array:
            return unified_attention(query, keys, values, lengths, tables, starts, platform=platform, **options)

        return chained(step, query, every)

    given = query, every, keys, values, lengths, starts
    compiled = jax.jit(run).lower(*given, **options).compile()
    return lambda: compiled(*given, **options)


def dense(cell: Cell, arrays: tuple[jax.Array, ...]) -> Iterator[tuple[str, TimedCall]]:
    """Operations on the keys and values of all sequences as arrays without pages, which are made beforehand."""
    query, keys, values, lengths, tables, _ = arrays
    count, same = len(cell.lengths), len(set(cell.lengths)) == 1
    if cell.decoding or cell.prefix or cell.tree or not same or keys.nbytes > 2.5e9 or keys.dtype != query.dtype:
        return
    every = [tables + n * (keys.shape[0] // cell.layers) for n in range(cell.layers)]
    shape = count, -1, cell.kv_heads, cell.size
    if cell.rows == 1:

        def run(query: jax.Array, caches: list[Any], *limits: jax.Array) -> Any:
            return chained(lambda query, cache: ragged_decode_attention(query, *cache, *limits), query, caches)

        given = query, [[x[pages].reshape(shape) for x in (keys, values)] for pages in every], 0 * lengths, lengths
        call = jax.jit(run).lower(*given).compile()
        yield "ragged_decode_attention, dense", lambda: call(*given)
        return
    keys, values = (x[tables].reshape(shape) for x in (keys, values))
    rows = query.reshape(count, cell.rows, cell.heads, cell.size)
    # The newest tokens are queries: query 0 attends to all keys but those of later queries.
    attend = functools.partial(flash_attention, sliding_window=(None, cell.context - cell.rows))
    flash = jax.jit(attend).lower(rows, keys, values).compile()
    yield "flash_attention, dense", lambda: flash(rows, keys, values).reshape(query.shape)


def apart(cell: Cell, arrays: tuple[jax.Array, ...], platform: str) -> TimedCall:
    """The sequences of a mixed batch that decode, and the others, in a call each."""
    query, keys, values, lengths, tables, starts = arrays
    rows, count = cell.batch * cell.rows, cell.batch
    first = query[:rows], keys, values, lengths[:count], tables[:count], starts[: count + 1]
    second = query[rows:], keys, values, lengths[count:], tables[count:], starts[count:] - starts[count]
    calls = [ours(part, platform, {}) for part in (first, second)]
    return lambda: jnp.concatenate([call() for call in calls])


def configured(arrays: tuple[jax.Array, ...]) -> Iterator[tuple[str, TimedCall]]:
    """The Triton kernel with every configuration worth measuring."""
    op = registry().ops["unified_attention"]
    (implementation,) = (i for i in registry().implementations[op.name] if i.name == "triton")
    fields = dict(zip(op.axes, arrays, strict=False))
    record = op.lower(op.arguments(**fields))
    for config in implementation.config.candidates(record, current_device(), "forward"):
        run = jax.jit(lambda record, config=config: implementation.function("forward")(record, config)[0][0])
        yield str(config), functools.partial(run, record)


def copy(cell: Cell) -> TimedCall:
    """A copy that moves as many bytes."""
    source = jax.random.normal(jax.random.key(1), (cell.layers * int(cell.bytes) // 8,), jnp.float32)
    compiled = jax.jit(lambda x: -x).lower(source).compile()
    return lambda: compiled(source)


def sides(cell: Cell, arrays: tuple[jax.Array, ...], candidates: bool, only: str) -> dict[str, TimedCall]:
    """Everything that can compute a cell here, on the platforms named in `only`."""
    found: dict[str, TimedCall] = {}
    slow = cell.operations > 1e12  # XLA would take minutes
    for platform in ("cuda", "pallas", "triton", "xla"):
        if (only and platform not in only.split(",")) or (platform == "xla" and slow):
            continue
        try:
            found[f"ejkernel {platform}"] = ours(arrays, platform, cell.options(), cell.layers)
            if cell.prefix:
                found[f"ejkernel {platform}, without shared_prefix"] = ours(arrays, platform, {})
            if cell.decoding:
                found[f"ejkernel {platform}, two calls"] = apart(cell, arrays, platform)
        except NotImplementedError:
            continue
    if found:
        found |= dict(dense(cell, arrays)) | dict(_paged_peers.peers(cell, arrays))
    return found | dict(configured(arrays)) if candidates else found


def truth(cell: Cell, arrays: tuple[jax.Array, ...]) -> list[tuple[int, np.ndarray]]:
    """Query rows, and their output for the first KV head's group, in float64."""
    query, keys, values, lengths, tables, starts = arrays
    group = cell.heads // cell.kv_heads
    made = []
    for sequence in sorted({0, len(cell.lengths) // 2, len(cell.lengths) - 1}):
        pages = np.asarray(tables[sequence])
        k, v = (
            np.asarray(x[pages, :, 0].reshape(-1, cell.size).astype(jnp.float32), np.float64) for x in (keys, values)
        )
        count, length = int(cell.queries[sequence]), int(lengths[sequence])
        for i in sorted({0, count // 2, count - 1}):
            row, end = int(starts[sequence]) + i, length - count + i + 1
            q = np.asarray(query[row, :group].astype(jnp.float32), np.float64)
            scores = q @ k[:end].T * cell.size**-0.5
            if cell.tree:
                scores[:, length - count :] += np.where(cell.ancestors[i, : i + 1], 0, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            made.append((row, weights / weights.sum(-1, keepdims=True) @ v[:end]))
    return made


def error(made: Any, want: list[tuple[int, np.ndarray]]) -> float:
    """Largest relative error of a row, of the first layer where there are several."""
    made = jax.tree.leaves(made)[0]
    made = made if isinstance(made, jax.Array) else made.float().cpu().numpy()  # PyTorch's
    got = [np.asarray(made[row, : len(x)].astype(jnp.float32)) for row, x in want]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, (_, y) in zip(got, want, strict=True))


def timed(cell: Cell, rounds: int, candidates: bool, only: str) -> list[list[str]]:
    """One line for each side."""
    arrays = cell.inputs()
    want, contenders = truth(cell, arrays), sides(cell, arrays, candidates, only)
    for name in list(contenders):
        off = error(contenders[name](), want)
        if not off < 1e-2:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
            del contenders[name]
    if cell.rows == 1:
        contenders["copy"] = copy(cell)
    medians = {name: x / cell.layers for name, x in time_in_turns(contenders, rounds).items()}
    return [[str(cell), name, f"{s * 1e3:.3f}", cell.rate(s)] for name, s in medians.items()]


def ends(part: str) -> list[int | None]:
    """Where a part of a list begins and ends: `4:7`, `:7`, or `4` for one."""
    found = [int(x) if x else None for x in part.split(":")]
    return found if len(found) > 1 else [int(part), int(part) + 1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--candidates", action="store_true", help="every configuration, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="platforms, separated by commas; without it all")
    parser.add_argument(
        "--cells", default=":", help="of the shapes, those from one number to another; commas between parts"
    )
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    every = list(cells(options.quick))
    chosen = [cell for part in options.cells.split(",") for cell in every[slice(*ends(part))]]
    given = (3 if options.quick else options.rounds, options.candidates, options.only)
    shared.report.print_rows_as_measured(COLUMNS, (row for cell in chosen for row in timed(cell, *given)))


if __name__ == "__main__":
    main()
