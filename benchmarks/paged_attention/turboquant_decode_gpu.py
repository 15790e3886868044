"""Decoding over TurboQuant caches on a GPU, against bfloat16 and float8 caches of the same keys and values.

    python benchmarks/paged_attention/turboquant_decode_gpu.py          # a table
    python benchmarks/paged_attention/turboquant_decode_gpu.py --quick  # one shape and one format
    python benchmarks/paged_attention/turboquant_decode_gpu.py --cells "page 16"  # shapes whose names have this text
    python benchmarks/paged_attention/turboquant_decode_gpu.py --formats "of 2"  # formats whose names have this text
    python benchmarks/paged_attention/turboquant_decode_gpu.py --check  # no times: a small batch, anywhere

All sides decode one token of each sequence over the same normal keys and values, whose pages are spread over the cache
at random. A side is timed only if its output agrees with float64 attention over the numbers that its cache stands for.
Sides are interleaved in samples of 25 ms, and medians are printed. The last column is the tokens that decode in
the time of the fastest bfloat16 side, relative to its own. Rates count each byte of the cache once, and queries and
outputs. The rotations of queries and outputs are in the times.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import ragged_page_attention_v2_turboquant
from ejkernel.planning import turboquant as codes
from ejkernel.quantization import turboquant

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from paged_attention.paged_attention_gpu import Cell, copy, error, ours, truth
from shared.turns import time_in_turns

COLUMNS = ("shape", "side", "ms", "rate", "tokens of bfloat16")
FLAGS = {"--check": "no times: a small batch, anywhere", "--quick": "one shape and one format"}
OPTIONS = {
    "--rounds": ("7", "samples of each side"),
    "--cells": ("", "text in the names of the shapes"),
    "--formats": ("", "text in the names of the formats"),
}


def in_chunks(function: Callable[..., tuple[jax.Array, ...]], *pages: jax.Array) -> tuple[jax.Array, ...]:
    """Calls a function on 256 pages at a time, since float32 copies of a whole cache would not fit."""
    compiled = jax.jit(function)
    chunks = [compiled(*(x[start : start + 256] for x in pages)) for start in range(0, pages[0].shape[0], 256)]
    return tuple(jnp.concatenate(parts) for parts in zip(*chunks, strict=True))


@dataclasses.dataclass(frozen=True)
class Format:
    """Bits of codes of keys and of values, and signs per key."""

    key_bits: int
    value_bits: int
    signs: int

    def __str__(self) -> str:
        signs = f" and {self.signs} signs" if self.signs else ""
        return f"keys of {self.key_bits} bit{'s' * (self.key_bits > 1)}{signs}, values of {self.value_bits}"

    def tables(self, size: int) -> tuple[jax.Array, ...]:
        """Rotation, projection and codebooks."""
        books = (
            jnp.asarray(turboquant.get_codebook(bits, size).centroids) for bits in (self.key_bits, self.value_bits)
        )
        rotation = turboquant.generate_rotation_matrix(0, size)
        return rotation, turboquant.generate_projection_matrix(1, self.signs, size), *books

    def encode(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of codes, signs and norms, a few hundred pages at a time."""
        rotation, projection, key_book, value_book = self.tables(keys.shape[-1])

        def encode_pages(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
            encoded = codes.encode_keys(keys, rotation, key_book, projection, self.key_bits)
            value_codes, norms, _ = codes.encode_vectors(values, rotation, value_book, self.value_bits)
            key_norms, norms = (x.astype(jnp.bfloat16) for x in (encoded.norms, norms))
            return encoded.codes, encoded.signs, key_norms, value_codes, norms

        return in_chunks(encode_pages, keys, values)

    def decode(self, pages: tuple[jax.Array, ...], size: int) -> tuple[jax.Array, jax.Array]:
        """The keys and values that pages stand for, in bfloat16."""
        rotation, projection, key_book, value_book = self.tables(size)

        def decode_pages(*stored: jax.Array) -> tuple[jax.Array, ...]:
            key_codes, signs, key_norms, value_codes, norms = stored
            key_norms, norms = key_norms.astype(jnp.float32), norms.astype(jnp.float32)
            keys = codes.decode_vectors(key_codes, key_norms[..., 0], key_book, self.key_bits)
            keys += codes.residual_factor(self.signs) * codes.decode_signs(signs, key_norms[..., 1]) @ projection
            values = codes.decode_vectors(value_codes, norms, value_book, self.value_bits)
            both = (codes.rotate_back(x, rotation).astype(jnp.bfloat16) for x in (keys, values))
            return tuple(both)

        first, second = in_chunks(decode_pages, *pages)
        return first, second


FORMATS = (
    Format(4, 4, 0),
    Format(4, 4, 128),
    Format(3, 4, 128),
    Format(2, 3, 128),
    Format(1, 2, 128),
    Format(3, 3, 0),
    Format(2, 2, 0),
)


CELLS = (
    Cell(),
    Cell(context=2048),
    Cell(page=16),
    Cell(batch=256, context=2048),
    Cell(batch=8),
    Cell(batch=64, context=16384, ragged=True),
)


def sides(cell: Cell, formatted: Format, arrays: tuple[jax.Array, ...]) -> Iterator[Any]:
    """Name, call, output in float64 and bytes of the cache of each side with a format."""
    query, keys, values, lengths, tables, starts = arrays
    pages = formatted.encode(keys, values)
    want = truth(cell, (query, *formatted.decode(pages, cell.size), lengths, tables, starts))
    used = int(cell.lengths.sum()) * cell.kv_heads
    size = used * sum(x[0, 0, 0].nbytes for x in pages)
    count = jnp.int32(len(cell.lengths))
    given = query, *pages, lengths, tables, starts, count, *formatted.tables(cell.size)
    platform = "cuda" if jax.default_backend() == "gpu" else "auto"
    call = jax.jit(functools.partial(ragged_page_attention_v2_turboquant, platform=platform)).lower(*given).compile()
    yield f"TurboQuant, {formatted}", functools.partial(call, *given), want, size


def numbers(cell: Cell, arrays: tuple[jax.Array, ...], platforms: tuple[str, ...]) -> Iterator[Any]:
    """The same of caches of bfloat16 and float8."""
    query, keys, values, *batch = arrays
    for dtype in ("bfloat16", "float8_e4m3fn"):
        stored = (query, keys.astype(dtype), values.astype(dtype), *batch)
        want = truth(cell, stored)
        size = int(cell.lengths.sum()) * cell.kv_heads * 2 * cell.size * jnp.dtype(dtype).itemsize
        for platform in platforms if jax.default_backend() == "gpu" else ("xla",):
            try:
                yield f"{dtype}, {platform}", ours(stored, platform, {}), want, size
            except NotImplementedError:
                continue


def timed(cell: Cell, rounds: int, quick: bool, formats: str) -> Iterator[list[str]]:
    """One line for each side."""
    arrays, contenders, sizes = cell.inputs(), {}, {}
    found = [*numbers(cell, arrays, ("cuda",) if quick else ("cuda", "triton"))]
    for formatted in FORMATS[: 1 if quick else None]:
        if formats in str(formatted):
            found += sides(cell, formatted, arrays)
    for name, run, want, size in found:
        off = error(run(), want)
        if off < 1e-2:
            contenders[name], sizes[name] = run, size
        else:
            print(f"<!-- {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
    medians = time_in_turns(contenders | {"copy of bfloat16's bytes": copy(cell)}, rounds)
    plain = min(seconds for name, seconds in medians.items() if name.startswith("bfloat16"))
    row_bytes = int(cell.queries.sum()) * cell.heads * cell.size * 2 * 2
    for name, seconds in medians.items():
        rate = (sizes.get(name, cell.bytes - row_bytes) + row_bytes) / seconds / 1e9
        yield [str(cell), name, f"{seconds * 1e3:.3f}", f"{rate:.0f} GB/s", f"{plain / seconds:.2f}"]


def check() -> None:
    """Compares every side with float64 on a small batch.

    Raises:
        AssertionError: One is wrong.
    """
    cell = Cell(batch=3, context=80, page=16, heads=4, kv_heads=2, size=64)
    arrays = cell.inputs()
    found = [*numbers(cell, arrays, ("cuda",))]
    for formatted in (Format(3, 4, 64), Format(4, 4, 0)):
        found += sides(cell, formatted, arrays)
    for name, run, want, size in found:
        off = error(run(), want)
        print(
            f"{name}: relative error {off:.2g}, {8 * size / (int(cell.lengths.sum()) * 2 * 2 * 64):.2f} bits per number"
        )
        assert off < 1e-2, name


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(__doc__, FLAGS, OPTIONS)
    if options.check:
        check()
        return
    quick = options.quick
    cells = [cell for cell in CELLS[: 1 if quick else None] if options.cells in str(cell)]
    lines = (line for cell in cells for line in timed(cell, int(options.rounds), quick, options.formats))
    shared.report.print_rows_as_measured(COLUMNS, lines)


if __name__ == "__main__":
    main()
