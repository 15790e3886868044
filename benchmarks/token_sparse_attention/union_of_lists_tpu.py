"""A study of latent lists in prefill on TPUs: attention to the union of neighbouring queries' lists, without a TPU.

    python benchmarks/token_sparse_attention/union_of_lists_tpu.py                 # four chips; some ten minutes
    python benchmarks/token_sparse_attention/union_of_lists_tpu.py --target v5e
    python benchmarks/token_sparse_attention/union_of_lists_tpu.py --check         # values, interpreted, on any machine

DeepSeek-V3.2's shape: 128 heads of one latent key of 512 + 64, and 2048 listed keys per query. A tile has 8 or 16
queries. The keys that some of its queries list move to the front by products with one-hot matrices, 256 keys at a time;
what is left is dense attention to 1024 such keys at a time. A key's terms, 0 or the mask of each query of the tile, are
in lanes of the key that are padding, so that the product with the queries adds them.

The times are static estimates per query. They leave out how lists become counts per query and key, which the kernel of
`token_sparse_attention` has: 2 K S operations per query, 1.4 us of 32768 keys on v5e at half of the peak.
"""

# ruff: noqa: TID251 - the kernel is part of the study
import argparse
import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.profile import CHIPS, Case, Workload, profile_many

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

HEADS, CHANNELS, VALUE, WIDTH, LISTED = 128, 576, 512, 640, 2048
LANES, BLOCK, GROUP, PIECE, SLOTS, ROWS, SCALE = 128, 2048, 256, 64, 1024, 256, 0.1
TILES = 2
"""Tiles of queries: one for each core of a v5p."""
MASK, MIN_ROW_MAX, LOG2E = -3e38, -1e30, 1.4426950408889634
TERM_LANE = CHANNELS - VALUE
"""The lane, of those after a value, from which on a key has a term per query of the tile."""


@dataclasses.dataclass(frozen=True)
class Refs:
    """The arrays of a tile of queries and of keys, and scratch memory."""

    used: Any
    query: Any
    key: Any
    counts: Any
    output: Any
    listed: Any
    tail: Any
    row_max: Any
    row_sum: Any
    acc: Any
    end: Any


def product(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def repeat(count: Any, body: Any) -> None:
    """Calls `body` with 0 to count - 1, a traced number."""
    lax.while_loop(lambda n: n < count, lambda n: (body(n), n + 1)[1], jnp.int32(0))


def kernel(*arrays: Any) -> None:
    refs = Refs(*arrays)
    tile, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)

    @pl.when(step == 0)
    def _() -> None:
        refs.row_max[...] = jnp.full_like(refs.row_max, MIN_ROW_MAX)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        refs.end[0] = 0

    store_tails(refs)
    first = (tile * steps + step) * (BLOCK // GROUP)
    repeat(BLOCK // GROUP, lambda n: append_group(refs, n, refs.used[first + n]))

    @pl.when(step == steps - 1)
    def _() -> None:
        start = lax.shift_right_logical(refs.end[0], 4)
        repeat(SLOTS // 16 - start, lambda n: mask_slots(refs, start + n))
        attend(refs)
        total = jnp.maximum(jnp.sum(refs.row_sum[...], axis=1, keepdims=True), 1e-30)
        refs.output[0] = (refs.acc[...] / total).astype(jnp.bfloat16)


def store_tails(refs: Refs) -> None:
    """Stores the last lanes of the keys with the terms of the tile's queries."""
    counts, queries = refs.counts[0], refs.counts.shape[1]
    terms = jnp.where(counts > 0, jnp.log2(jnp.maximum(counts, 1.0)), MASK)
    for start in range(0, BLOCK, LANES):
        rows = [(TERM_LANE, None), (queries, terms[:, start : start + LANES]), (LANES - TERM_LANE - queries, None)]
        columns = [jnp.zeros((n, LANES), jnp.float32) if x is None else x for n, x in rows]
        tail = refs.key[0, start : start + LANES, VALUE:] + jnp.concatenate(columns).T
        refs.tail[start : start + LANES, :] = tail.astype(jnp.bfloat16)


def append_group(refs: Refs, group: Any, count: Any) -> None:
    """Appends the keys of a group that some query lists, and attends to 1024 of them once there are as many."""
    keys, start = pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP), refs.end[0]
    used = jnp.max(jnp.where(refs.counts[0, :, keys] > 0, 1.0, 0.0), axis=0, keepdims=True)
    before = [lax.broadcasted_iota(jnp.int32, (GROUP, GROUP), axis) for axis in (0, 1)]
    is_before = jnp.where(before[0] < before[1], 1.0, 0.0).astype(jnp.bfloat16)
    slot = product(jnp.broadcast_to(used, (8, GROUP)).astype(jnp.bfloat16), is_before, (1, 0))[:1]
    slot = jnp.where(used > 0, slot, -1.0).astype(jnp.int32)

    def append_piece(n: Any) -> None:
        row = lax.broadcasted_iota(jnp.int32, (PIECE, GROUP), 0) + n * PIECE
        one_hot = jnp.where(row == slot, 1.0, 0.0).astype(jnp.bfloat16)
        slots = pl.ds(pl.multiple_of(start + n * PIECE, 16), PIECE)
        refs.listed[slots, :VALUE] = product(one_hot, refs.key[0, keys, :VALUE], (1, 0)).astype(jnp.bfloat16)
        is_padding = (row[:, :LANES] >= count) & is_term(refs, PIECE)
        tail = product(one_hot, refs.tail[keys, :], (1, 0))
        refs.listed[slots, VALUE:] = jnp.where(is_padding, MASK, tail).astype(jnp.bfloat16)

    repeat(lax.shift_right_logical(count + PIECE - 1, PIECE.bit_length() - 1), append_piece)
    refs.end[0] = start + lax.shift_left(lax.shift_right_logical(count + 15, 4), 4)

    @pl.when(refs.end[0] >= SLOTS)
    def _() -> None:
        attend(refs)
        left = refs.end[0] - SLOTS
        repeat(lax.shift_right_logical(left + PIECE - 1, PIECE.bit_length() - 1), functools.partial(move_left, refs))
        refs.end[0] = left


def is_term(refs: Refs, rows: int) -> jax.Array:
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    return (lane >= TERM_LANE) & (lane < TERM_LANE + refs.counts.shape[1])


def move_left(refs: Refs, n: Any) -> None:
    """Moves keys that were not attended yet to the front."""
    target = pl.ds(pl.multiple_of(n * PIECE, PIECE), PIECE)
    refs.listed[target, :] = refs.listed[pl.ds(pl.multiple_of(SLOTS + n * PIECE, PIECE), PIECE), :]


def mask_slots(refs: Refs, n: Any) -> None:
    """Masks 16 slots that have no key: zeros, so that nothing is left of other numbers."""
    slots = pl.ds(pl.multiple_of(n * 16, 16), 16)
    refs.listed[slots, :VALUE] = jnp.zeros((16, VALUE), jnp.bfloat16)
    refs.listed[slots, VALUE:] = jnp.where(is_term(refs, 16), MASK, 0.0).astype(jnp.bfloat16)


def attend(refs: Refs) -> None:
    """Adds 1024 keys to the sums of all rows, 256 rows at a time."""

    def attend_rows(n: Any) -> None:
        rows = pl.ds(pl.multiple_of(n * ROWS, ROWS), ROWS)
        scores = product(refs.query[0, rows, :], refs.listed[:SLOTS, :], (1, 1)) * (SCALE * LOG2E)
        before = refs.row_max[rows, :]
        row_max = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        alpha = jnp.exp2(before - row_max)
        weights = jnp.exp2(scores - jnp.concatenate([row_max] * (SLOTS // LANES), axis=1))
        refs.row_max[rows, :] = row_max
        sums = sum(weights[:, lane : lane + LANES] for lane in range(0, SLOTS, LANES))
        refs.row_sum[rows, :] = refs.row_sum[rows, :] * alpha + sums
        weighted = product(weights.astype(jnp.bfloat16), refs.listed[:SLOTS, :VALUE], (1, 0))
        refs.acc[rows, :] = refs.acc[rows, :] * jnp.concatenate([alpha] * (VALUE // LANES), axis=1) + weighted

    repeat(refs.query.shape[1] // ROWS, attend_rows)


def attend_union(used: Any, query: Any, key: Any, counts: Any) -> Any:
    """Returns the outputs [tiles, rows, 512].

    Args:
        used: int32, how many keys of each group some query of a tile lists, of all tiles and groups.
        query: [tiles, rows, 640], with 1 in the lane of the row's query among those of terms.
        key: [1, S, 640].
        counts: float32 [tiles, queries, S], how often a query lists a key.
    """
    (tiles, rows, _), queries = query.shape, counts.shape[1]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles, key.shape[1] // BLOCK),
        in_specs=[
            pl.BlockSpec((1, rows, WIDTH), lambda t, j, used: (t, 0, 0)),
            pl.BlockSpec((1, BLOCK, WIDTH), lambda t, j, used: (0, j, 0)),
            pl.BlockSpec((1, queries, BLOCK), lambda t, j, used: (t, 0, j)),
        ],
        out_specs=pl.BlockSpec((1, rows, VALUE), lambda t, j, used: (t, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM((SLOTS + GROUP + PIECE, WIDTH), jnp.bfloat16),
            pltpu.VMEM((BLOCK, LANES), jnp.bfloat16),
            *(pltpu.VMEM((rows, width), jnp.float32) for width in (LANES, LANES, VALUE)),
            pltpu.SMEM((1,), jnp.int32),
        ],
    )
    parameters = pltpu.CompilerParams(vmem_limit_bytes=60 * 2**20, dimension_semantics=("parallel", "arbitrary"))
    shape = jax.ShapeDtypeStruct((tiles, rows, VALUE), jnp.bfloat16)
    return pl.pallas_call(
        kernel, grid_spec=grid_spec, out_shape=shape, name="attend_union", compiler_params=parameters
    )(used, query, key, counts)


def counts_of_lists(tiles: int, queries: int, keys: int, shared: float) -> np.ndarray:
    """Returns counts of lists: each has a share of the list of the query before it, and other keys at random."""
    counts, random = np.zeros((tiles, queries, keys), np.float32), np.random.default_rng(0)
    for t in range(tiles):
        listed = random.permutation(keys)[: min(LISTED, keys // 4)]
        for q in range(queries):
            if q:
                kept = random.permutation(listed)[: int(shared * len(listed))]
                others = random.permutation(np.setdiff1d(np.arange(keys), kept))
                listed = np.concatenate([kept, others[: len(listed) - len(kept)]])
            counts[t, q, listed] = 1
    return counts


def used_of_counts(counts: np.ndarray) -> np.ndarray:
    used = (counts > 0).any(axis=1)
    return used.reshape(-1, GROUP).sum(axis=1).astype(np.int32)


def workload(keys: int, shared: float, queries: int) -> Workload:
    tiles, shape = TILES, jax.ShapeDtypeStruct
    rows = queries * HEADS
    args = (
        used_of_counts(counts_of_lists(tiles, queries, keys, shared)),
        shape((tiles, rows, WIDTH), jnp.bfloat16),
        shape((1, keys, WIDTH), jnp.bfloat16),
        shape((tiles, queries, keys), jnp.float32),
    )
    flops = 2.0 * tiles * rows * LISTED * (CHANNELS + VALUE)
    return Workload(function=attend_union, args=args, flops=flops, min_hbm_bytes=0)


def check() -> None:
    """Compares the values with those of dense attention with a mask."""
    tiles, queries, keys, random = 1, 8, 4 * BLOCK, np.random.default_rng(1)
    counts = counts_of_lists(tiles, queries, keys, 0.5)
    query = np.zeros((tiles, queries, HEADS, WIDTH), np.float32)
    query[..., :CHANNELS] = random.normal(size=(tiles, queries, HEADS, CHANNELS))
    for n in range(queries):
        query[:, n, :, CHANNELS + n] = 1
    key = np.zeros((1, keys, WIDTH), np.float32)
    key[..., :CHANNELS] = random.normal(size=(1, keys, CHANNELS))
    query, key = jnp.asarray(query.reshape(tiles, -1, WIDTH), jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(attend_union)(used_of_counts(counts), query, key, counts)
    q, k = (np.asarray(x, np.float32)[..., :CHANNELS] for x in (query, key[0]))
    scores = np.einsum("trd,sd->trs", q, k) * SCALE
    scores = np.where(np.repeat(counts, HEADS, axis=1) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = (weights / weights.sum(axis=-1, keepdims=True)) @ k[:, :VALUE]
    print(f"largest difference: {np.abs(np.asarray(got, np.float32) - expected).max():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=list(CHIPS), help="repeatable; all if left out")
    parser.add_argument("--quick", action="store_true", help="one small case, for v5e")
    parser.add_argument("--check", action="store_true", help="only compare values")
    arguments = parser.parse_args()
    print(shared.report.heading())
    if arguments.check:
        check()
        return
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install 'ejkernel-pallas[aot]'")
        return
    sizes = [(n, s, q) for q in (8, 16) for n in (32768, 131072) for s in (0.0, 0.8)]
    if arguments.quick:
        sizes = [(8192, 0.8, 8)]
    kwargs = [{"keys": n, "shared": s, "queries": q} for n, s, q in sizes]
    cases = [Case(label=str(x), build=f"{__file__}:workload", kwargs=x) for x in kwargs]
    rows = []
    for target in arguments.target or (["v5e"] if arguments.quick else CHIPS):
        for report, (keys, share, queries) in zip(profile_many(cases, target=target), sizes, strict=True):
            time = "-" if report.error is not None else f"{report.seconds * 1e6 / (TILES * queries):.1f}"
            rows.append((target, keys, queries, f"{share:.0%}", time, report.error or ""))
    columns = ("chip", "keys", "queries per tile", "shared with the query before", "µs per query", "error")
    print(shared.report.markdown_table(columns, rows))


if __name__ == "__main__":
    main()
