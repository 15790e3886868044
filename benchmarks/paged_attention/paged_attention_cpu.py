"""Paged attention on a CPU against the obvious composition: gather all pages of the tables, then masked attention.

    python benchmarks/paged_attention/paged_attention_cpu.py            # takes some minutes
    python benchmarks/paged_attention/paged_attention_cpu.py --quick    # an eighth of the tokens

Both sides get the same random inputs, are compiled, and must agree before anything is timed. Runs are interleaved, so a
noisy machine disturbs both; the medians are printed.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import page_attention, unified_attention

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

HEADS, KV_HEADS, SIZE, SLOTS = 16, 4, 128, 16


@dataclasses.dataclass(frozen=True)
class Load:
    """Sequences with their lengths and how many of their newest tokens are queries; tables for `longest` tokens."""

    name: str
    lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    longest: int


def loads(factor: int) -> tuple[Load, ...]:
    """What is measured, with lengths divided by `factor`."""
    some = tuple(n // factor for n in (2048, 1500, 1024, 512, 300, 200, 100, 50))
    long = 2048 // factor
    return (
        Load("decode, equal lengths", (long,) * 8, (1,) * 8, long),
        Load("decode, mixed lengths", some, (1,) * 8, long),
        Load("decode, tables 4x too wide", some, (1,) * 8, 4 * long),
        Load("prefill of one prompt", (long,), (long,), long),
        Load("chunk of 256 and 7 decodes", (long, *some[1:]), (256 // factor, *(1,) * 7), long),
    )


def inputs(load: Load, dtype: Any) -> tuple[jax.Array, ...]:
    """Queries, caches, lengths, tables and starts."""
    rng, entries = np.random.default_rng(0), -(-load.longest // SLOTS)
    used = [-(-n // SLOTS) for n in load.lens]
    pages = sum(used) + 1
    order, tables = iter(rng.permutation(pages - 1) + 1), np.zeros((len(load.lens), entries), np.int32)
    for row, count in zip(tables, used, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    floats = [rng.normal(size=(sum(load.q_lens), HEADS, SIZE)), *rng.normal(size=(2, pages, SLOTS, KV_HEADS, SIZE))]
    ints = np.array(load.lens), tables, np.cumsum([0, *load.q_lens])
    return (*(jnp.asarray(x, dtype) for x in floats), *(jnp.asarray(x, jnp.int32) for x in ints))


def ours(
    query: jax.Array, key: jax.Array, value: jax.Array, lens: jax.Array, tables: jax.Array, starts: jax.Array
) -> jax.Array:
    """The library: `page_attention` where every sequence has one query, else `unified_attention`."""
    if len(query) == len(lens):
        return page_attention(query, key, value, lens, tables, kv_layout="pshd")
    return unified_attention(query, key, value, lens, tables, starts)


def obvious(
    query: jax.Array, key: jax.Array, value: jax.Array, lens: jax.Array, tables: jax.Array, starts: jax.Array
) -> jax.Array:
    """All pages of the tables, gathered, and for each query row its sequence's, masked."""
    rows = jnp.arange(len(query))
    sequence = jnp.searchsorted(starts[1:], rows, side="right")
    position = lens[sequence] - (starts[sequence + 1] - starts[sequence]) + rows - starts[sequence]
    keys, values = (x[tables].reshape(len(lens), -1, *x.shape[2:]) for x in (key, value))
    mask = jnp.arange(keys.shape[1]) <= position[:, None]
    if len(lens) == 1:  # one prompt needs no copy of its keys for every row
        return jax.nn.dot_product_attention(query[None], keys, values, mask=mask[None, None])[0]
    if len(query) == len(lens):
        return jax.nn.dot_product_attention(query[:, None], keys, values, mask=mask[:, None, None])[:, 0]
    return rows_of_each(query, keys, values, mask, starts)


def rows_of_each(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, starts: jax.Array) -> jax.Array:
    """Rows padded to the longest sequence, which here is all rows: what a batch without packing costs."""
    index = jnp.minimum(starts[:-1, None] + jnp.arange(len(query)), len(query) - 1)
    padded = jax.nn.dot_product_attention(query[index], keys, values, mask=mask[index][:, None])
    sequence = jnp.searchsorted(starts[1:], jnp.arange(len(query)), side="right")
    return padded[sequence, jnp.arange(len(query)) - starts[sequence]]


def interleaved(calls: list[Callable[..., Any]], arguments: tuple[jax.Array, ...], repeats: int) -> list[float]:
    """Median milliseconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, record in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            record.append(time.perf_counter() - start)
    return [1e3 * statistics.median(record) for record in times]


def measure(load: Load, dtype: Any, repeats: int) -> list[str]:
    """A row of the table."""
    arguments = inputs(load, dtype)
    calls = [jax.jit(function).lower(*arguments).compile() for function in (ours, obvious)]
    first, second = (np.asarray(call(*arguments), np.float32) for call in calls)
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-4 if dtype == jnp.float32 else 3e-2)
    mine, theirs = interleaved(calls, arguments, repeats)
    memory = [call.memory_analysis().temp_size_in_bytes / 2**20 for call in calls]
    times = [f"{mine:.1f}", f"{theirs:.1f}", f"{theirs / mine:.1f}"]
    return [load.name, jnp.dtype(dtype).name, *times, *(f"{x:.0f}" for x in memory)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each side")
    options = parser.parse_args()
    dtypes = (jnp.float32, jnp.bfloat16)
    rows = [measure(load, dtype, options.repeats) for load in loads(8 if options.quick else 1) for dtype in dtypes]
    print(heading())
    columns = ("load", "dtype", "ejkernel, ms", "obvious, ms", "times faster", "ejkernel, MiB", "obvious, MiB")
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
