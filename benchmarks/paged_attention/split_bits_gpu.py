"""No times: the bits of rows of Hopper's paged attention in fixed splits, and the controls that must differ.

    python benchmarks/paged_attention/split_bits_gpu.py
    python benchmarks/paged_attention/split_bits_gpu.py --cases 0:1     # some of the four: processes may share a GPU

One batch has sequences of one to nine splits, some of which are prefill. Its rows are compared with those of other
calls: sequences alone, one token instead of a chunk, other numbers of programs, folds in the launch, whole items
instead of slots, smaller pages and a wider table. The controls are splits of another size, and shares that are cut
anywhere. A line says how many of the compared numbers differ: none where bits must be equal, some in the controls. The
last line says whether all are as expected, and the exit status is 1 if not.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention, reference
from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors
from ejkernel_pallas.gpu.paged_attention import config, forward, spec

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("heads", "head size", "dtype", "window", "change", "differ", "expected")
LENGTHS, ROWS = (9000, 1, 1030, 2500, 1024, 4100), (530, 1, 40, 1, 3, 31)
KV_HEADS, SLOTS = 2, 64
CASES: tuple[tuple[int, int, Any, tuple[int, int] | None], ...] = (
    (8, 128, jnp.bfloat16, None),
    (8, 64, jnp.float16, None),
    (16, 128, jnp.float16, (1500, 0)),
    (6, 64, jnp.bfloat16, (2000, 0)),  # three query heads per KV head: queries are copied, not read in place
)
"""Query heads, head size, dtype and window."""
PARAMS = config.HopperPaged(
    num_programs=132, split_keys=config.INVARIANT_SPLIT_KEYS, split_doublings=config.INVARIANT_SPLIT_DOUBLINGS
)


def make_record(heads: int, size: int, dtype: Any, window: tuple[int, int] | None) -> PagedAttention:
    """Returns the batch, whose pages lie in any order."""
    columns, rng = -(-max(LENGTHS) // SLOTS), np.random.default_rng(0)
    pages = len(LENGTHS) * columns
    query, keys, values = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((sum(ROWS), heads, size), *[(pages, SLOTS, KV_HEADS, size)] * 2)
    )
    return PagedAttention(
        query=query,
        key_pages=keys,
        value_pages=values,
        block_tables=jnp.asarray(rng.permutation(pages).reshape(len(LENGTHS), columns), jnp.int32),
        kv_lens=jnp.array(LENGTHS, jnp.int32),
        query_start=jnp.asarray(np.cumsum((0, *ROWS)), jnp.int32),
        softmax_scale=size**-0.5,
        sliding_window=window,
        kv_layout="pshd",
        kv_heads=None,
    )


def outputs(record: PagedAttention, params: config.HopperPaged = PARAMS) -> list[np.ndarray]:
    """Returns output and lse, whose bits are those that the kernels wrote."""
    found = jax.jit(lambda record: forward.forward(record, params)[0])(record)
    return [np.asarray(x.astype(jnp.float32)) for x in found]


def rows_of(sequence: int) -> np.ndarray:
    """Returns the query rows of a sequence."""
    return np.arange(sum(ROWS[:sequence]), sum(ROWS[: sequence + 1]))


def sequence_alone(record: PagedAttention, sequence: int, num_rows: int | None = None) -> PagedAttention:
    """Returns a call of the last rows of one sequence."""
    rows = rows_of(sequence)[-(num_rows or ROWS[sequence]) :]
    assert record.block_tables is not None
    return dataclasses.replace(
        record,
        query=record.query[rows],
        query_start=jnp.array([0, len(rows)], jnp.int32),
        kv_lens=record.kv_lens[sequence : sequence + 1],
        block_tables=record.block_tables[sequence : sequence + 1],
    )


def newest_rows(record: PagedAttention) -> PagedAttention:
    """Returns a call of the newest token of each sequence."""
    newest = np.cumsum(ROWS) - 1
    return dataclasses.replace(record, query=record.query[newest], query_start=None)


def smaller_pages(record: PagedAttention) -> PagedAttention:
    """Returns the same cache in pages of half the size, with a wider table."""
    assert record.block_tables is not None
    assert record.value_pages is not None
    tables = np.asarray(record.block_tables)
    halves = np.stack([2 * tables, 2 * tables + 1], axis=-1).reshape(tables.shape[0], -1)
    return dataclasses.replace(
        record,
        key_pages=record.key_pages.reshape(-1, SLOTS // 2, *record.key_pages.shape[2:]),
        value_pages=record.value_pages.reshape(-1, SLOTS // 2, *record.value_pages.shape[2:]),
        block_tables=jnp.asarray(np.pad(halves, ((0, 0), (0, 70)), constant_values=-1), jnp.int32),
    )


def changes(record: PagedAttention) -> Iterator[tuple[str, list[np.ndarray], np.ndarray | slice, bool]]:
    """Yields what is changed, the outputs, the rows of the whole call that they are, and whether bits must be equal."""
    for sequence in range(len(LENGTHS)):
        yield f"sequence {sequence} alone", outputs(sequence_alone(record, sequence)), rows_of(sequence), True
    for rows in (31, 32, 100, 129):
        alone = outputs(sequence_alone(record, 0, rows))
        yield f"the last {rows} rows of sequence 0", alone, rows_of(0)[-rows:], True
    yield "the newest row of each sequence", outputs(newest_rows(record)), np.cumsum(ROWS) - 1, True
    for programs in (8, 50, 131):
        params = dataclasses.replace(PARAMS, num_programs=programs)
        yield f"{programs} programs", outputs(record, params), slice(None), True
    yield "all rows by decoding", outputs(record, dataclasses.replace(PARAMS, prefill_tokens=10**6)), slice(None), True
    yield "all rows by prefill", outputs(record, dataclasses.replace(PARAMS, prefill_tokens=2)), slice(None), True
    with mock.patch.object(spec, "MAX_SLOT_BYTES", 1):
        yield "whole items", outputs(record), slice(None), True
        yield "the newest rows as whole items", outputs(newest_rows(record)), np.cumsum(ROWS) - 1, True
    in_launch = dataclasses.replace(PARAMS, folds_in_launch=True)
    yield "folds in the launch", outputs(record, in_launch), slice(None), True
    yield "the newest rows, folds in the launch", outputs(newest_rows(record), in_launch), np.cumsum(ROWS) - 1, True
    yield "smaller pages, a wider table", outputs(smaller_pages(record)), slice(None), True
    yield "control: splits of 512", outputs(record, dataclasses.replace(PARAMS, split_keys=512)), slice(None), False
    usual = dataclasses.replace(PARAMS, split_keys=0, split_doublings=())
    newest = outputs(newest_rows(record), usual)
    yield "control: the usual kernels", outputs(record, usual), slice(None), False
    yield "control: the usual newest rows", newest, np.cumsum(ROWS) - 1, False


def check_values(record: PagedAttention, found: list[np.ndarray]) -> None:
    """Compares some rows with the reference."""
    for sequence in (2, 4):
        alone = sequence_alone(record, sequence)
        expected = jax.jit(lambda record: reference(record)[0])(alone)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[rows_of(sequence)], np.asarray(y, np.float32), atol=2e-2)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=":", help="a slice of the cases, such as 0:1")
    start, stop = (int(x) if x else None for x in parser.parse_args().cases.split(":"))
    if not shared.report.has_gpu():
        return
    wrong: list[str] = []

    def lines() -> Iterator[tuple[str, ...]]:
        for heads, size, dtype, window in CASES[start:stop]:
            record = make_record(heads, size, dtype, window)
            whole = outputs(record)
            check_values(record, whole)
            for name, found, rows, is_equal in changes(record):
                pairs = [(x.view(np.int32), y[rows].view(np.int32)) for x, y in zip(found, whole, strict=True)]
                counts = [int((x != y).sum()) for x, y in pairs]
                if (sum(counts) == 0) != is_equal:
                    wrong.append(f"{size}, {name}")
                shown = f"{counts[0]} of {pairs[0][0].size}, {counts[1]} of {pairs[1][0].size}"
                expected = "none" if is_equal else "some"
                yield str(heads), str(size), jnp.dtype(dtype).name, str(window), name, shown, expected

    print(f"{num_multiprocessors()} multiprocessors")
    shared.report.print_rows_as_measured(COLUMNS, lines())
    print("all as expected" if not wrong else f"not as expected: {'; '.join(wrong)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
