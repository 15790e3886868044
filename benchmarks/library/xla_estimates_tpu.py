"""XLA's own programs on a TPU, without a TPU: its compiler's estimates for sparse attention, to compare kernels with.

    python benchmarks/library/xla_estimates_tpu.py                 # all chips and calls
    python benchmarks/library/xla_estimates_tpu.py --target v6e    # one chip
    python benchmarks/library/xla_estimates_tpu.py --quick         # one small call, for v5e

libtpu writes the cycles that it expects of a fusion, a copy or a product into the compiled program. This script adds
them up, those of a loop as often as it runs. Sorts, gathers and scatters have no estimate: the times are lower bounds,
and the column "not estimated" counts such operations.

Needs libtpu: pip install "ejkernel-pallas[aot]".
"""

import argparse
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import lightning_indexer, native_sparse_attention, token_sparse_attention
from ejkernel_pallas.tpu.profile import CHIPS
from ejkernel_pallas.tpu.profile.compiling import compiling_for

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("call", "chip", "µs at least", "not estimated")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
NOT_ESTIMATED = re.compile(r" (sort|gather|scatter|fusion)\(")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call for XLA: name, function, arguments, and trips of the loops whose count is not in the program, by depth."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    trips: tuple[int, ...] = ()


def indexer(queries: int, keys: int, selected: int = 2048) -> Call:
    """DeepSeek-V3.2's indexer: tokens that select from all keys, which XLA's program scores in tiles of `selected`."""

    def forward(query: Any, key: Any, weights: Any) -> Any:
        return lightning_indexer(query, key, weights, top_k=selected, causal=False, platform="xla")

    shape = jax.ShapeDtypeStruct
    args = (
        shape((1, queries, 64, 128), jnp.bfloat16),
        shape((1, keys, 128), jnp.bfloat16),
        shape((1, queries, 64), jnp.float32),
    )
    tiles = -(-keys // selected)  # of keys, for eight queries at a time
    trips = (tiles,) if queries <= 8 else (-(-queries // 8), tiles)
    return Call(f"lightning indexer, {queries} queries, {keys} keys", forward, args, trips)


def indexer_pages(requests: int, queries: int, keys: int, key_dtype: str = "bfloat16", selected: int = 2048) -> Call:
    """The decode step of DeepSeek-V3.2's indexer over pages of 64 tokens, request by request in XLA's program."""
    slots = 64
    has_scales = key_dtype != "bfloat16"

    def forward(query: Any, cache: Any, weights: Any, tables: Any, scales: Any = None) -> Any:
        options: dict[str, Any] = {"key_scales": scales, "block_tables": tables, "top_k": selected}
        return lightning_indexer(query, cache, weights, **options, platform="xla")

    shape = jax.ShapeDtypeStruct
    pages = requests * keys // slots
    args = (
        shape((requests, queries, 64, 128), jnp.bfloat16),
        shape((pages, slots, 128), key_dtype),
        shape((requests, queries, 64), jnp.float32),
        shape((requests, keys // slots), jnp.int32),
        *((shape((pages, slots), jnp.float32),) if has_scales else ()),
    )
    name = f"lightning indexer, decode, {requests} x {queries} queries, {keys} keys of {key_dtype}"
    return Call(name, forward, args, (requests, -(-keys // selected)))


def latent_lists(queries: int, keys: int, listed: int = 2048) -> Call:
    """DeepSeek-V3.2: attention to listed keys, 128 heads of a latent key of 512 + 64. XLA takes 1 query at a time."""

    def forward(query: Any, key: Any, indices: Any) -> Any:
        return token_sparse_attention(query, key, None, indices, softmax_scale=0.1, value_size=512, platform="xla")

    shape = jax.ShapeDtypeStruct
    args = (
        shape((1, queries, 128, 576), jnp.bfloat16),
        shape((1, keys, 1, 576), jnp.bfloat16),
        shape((1, queries, listed), jnp.int32),
    )
    return Call(f"listed keys, latent, {queries} queries, {keys} keys", forward, args, (queries,))


def grouped_lists(queries: int, keys: int, listed: int = 2048) -> Call:
    """Attention to listed keys with 64 heads of 128 and 4 KV heads. XLA takes 1 KV head and 4 queries at a time."""

    def forward(query: Any, key: Any, value: Any, indices: Any) -> Any:
        return token_sparse_attention(query, key, value, indices, platform="xla")

    shape = jax.ShapeDtypeStruct
    array = shape((1, keys, 4, 128), jnp.bfloat16)
    args = (shape((1, queries, 64, 128), jnp.bfloat16), array, array, shape((1, queries, listed), jnp.int32))
    return Call(f"listed keys, grouped, {queries} queries, {keys} keys", forward, args, (4, -(-queries // 4)))


def latent_pages(requests: int, keys: int, width: int, listed: int = 2048, slots: int = 64) -> Call:
    """The decode step of `latent_lists` over pages, with rows of 576 channels or padded ones."""

    def forward(query: Any, cache: Any, indices: Any, tables: Any) -> Any:
        options: dict[str, Any] = {"block_tables": tables, "softmax_scale": 0.1, "value_size": 512}
        return token_sparse_attention(query, cache, None, indices, **options, platform="xla")

    shape = jax.ShapeDtypeStruct
    args = (
        shape((requests, 1, 128, width), jnp.bfloat16),
        shape((requests * keys // slots, slots, 1, width), jnp.bfloat16),
        shape((requests, 1, listed), jnp.int32),
        shape((requests, keys // slots), jnp.int32),
    )
    return Call(f"listed keys, latent, decode, {requests} queries, rows of {width}", forward, args, (requests,))


def grouped_pages(requests: int, keys: int, listed: int = 2048, slots: int = 64) -> Call:
    """The decode step of `grouped_lists` over pages. XLA takes 1 KV head and 4 queries at a time."""

    def forward(query: Any, key: Any, value: Any, indices: Any, tables: Any) -> Any:
        return token_sparse_attention(query, key, value, indices, block_tables=tables, platform="xla")

    shape = jax.ShapeDtypeStruct
    pages = shape((requests * keys // slots, slots, 4, 128), jnp.bfloat16)
    lists = shape((requests, 1, listed), jnp.int32), shape((requests, keys // slots), jnp.int32)
    args = (shape((requests, 1, 64, 128), jnp.bfloat16), pages, pages, *lists)
    return Call(f"listed keys, grouped, decode, {requests} queries", forward, args, (4, -(-requests // 4)))


def block_pages(requests: int, keys: int, blocks: int = 16, slots: int = 64) -> Call:
    """The decode step of native sparse attention over pages: blocks of 64 keys. XLA takes 1 KV head and 8 queries."""

    def forward(query: Any, key: Any, value: Any, indices: Any, tables: Any) -> Any:
        options: dict[str, Any] = {"block_indices": indices, "block_size": 64, "block_tables": tables}
        return native_sparse_attention(query, key, value, **options, platform="xla")

    shape = jax.ShapeDtypeStruct
    pages = shape((requests * keys // slots, slots, 4, 128), jnp.bfloat16)
    lists = shape((requests, 1, 4, blocks), jnp.int32), shape((requests, keys // slots), jnp.int32)
    args = (shape((requests, 1, 64, 128), jnp.bfloat16), pages, pages, *lists)
    return Call(f"listed blocks, decode, {requests} queries", forward, args, (4, -(-requests // 8)))


QUICK = (indexer(8, 512, 256),)
ALL = (
    *(indexer(queries, 32768) for queries in (1, 8, 256)),
    indexer(256, 131072),
    *(indexer_pages(16, queries, 32768) for queries in (1, 2, 8)),
    indexer_pages(16, 1, 32768, "float8_e4m3fn"),
    indexer_pages(16, 1, 131072),
    *(latent_pages(16, 32768, width) for width in (576, 640)),
    grouped_pages(16, 32768),
    block_pages(16, 32768),
    *(make(256, keys) for make in (latent_lists, grouped_lists) for keys in (8192, 32768, 131072)),
)


def cycles(program: str, trips_by_depth: tuple[int, ...]) -> tuple[int, int]:
    """The cycles of a compiled program, and how many operations without an estimate it runs."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        if found := COMPUTATION.match(line):
            name = found[2]
            entry = name if found[1] else entry
        elif name and " = " in line:
            computations.setdefault(name, []).append(line)

    def add(name: str, depth: int = 0) -> tuple[int, int]:
        total = missing = 0
        for line in computations.get(name, ()):
            if " while(" in line:
                found = TRIPS.search(line)
                trips = int(found[1]) if found else trips_by_depth[depth]
                inside = add(re.findall(r"body=%?([\w.\-]+)", line)[0], depth if found else depth + 1)
                total, missing = total + trips * inside[0], missing + trips * inside[1]
            elif found := ESTIMATE.search(line):
                total += int(found[1])
            elif NOT_ESTIMATED.search(line):
                missing += 1
        return total, missing

    return add(entry)


def row(call: Call, target: str) -> Sequence[object]:
    chip = CHIPS[target]
    with compiling_for(chip) as sharding:
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in call.args]
        compiled = jax.jit(call.function).trace(*args).lower(lowering_platforms=("tpu",)).compile()
    total, missing = cycles(compiled.as_text() or "", call.trips)
    return call.name, target, f"{total / chip.clock_hz * 1e6:.0f}", missing


def rows(calls: Iterable[Call], targets: Iterable[str]) -> Iterable[Sequence[object]]:
    targets = list(targets)
    return (row(call, target) for call in calls for target in targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small call, for v5e")
    parser.add_argument("--target", action="append", choices=list(CHIPS), help="repeatable; all if left out")
    parser.add_argument("--only", default="", help="a word in the call's name")
    arguments = parser.parse_args()
    print(shared.report.heading())
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install 'ejkernel-pallas[aot]'")
        return
    calls = QUICK if arguments.quick else [call for call in ALL if arguments.only in call.name]
    targets = arguments.target or (["v5e"] if arguments.quick else CHIPS)
    print(shared.report.markdown_table(COLUMNS, rows(calls, targets)))


if __name__ == "__main__":
    main()
