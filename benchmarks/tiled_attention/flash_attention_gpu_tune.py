"""Measures flash attention's tiles on a GPU, into the tables that `ejkernel-triton` and `ejkernel-pallas` ship for it.

    python benchmarks/tiled_attention/flash_attention_gpu_tune.py triton \
        --export packages/ejkernel-triton/src/ejkernel_triton/tuned
    python benchmarks/tiled_attention/flash_attention_gpu_tune.py pallas \
        --export packages/ejkernel-pallas/src/ejkernel_pallas/tuned
    python benchmarks/tiled_attention/flash_attention_gpu_tune.py pallas --quick  # one call, no table

Each line is one `ejkernel tune`, which measures both passes; a call stands for all of its kind: dtype, head sizes,
lengths in coarse steps, mask, and what else there is to compute of a score. An interrupted run leaves the lines that
it finished.
"""

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ejkernel.cli import main as ejkernel

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from shared.gpu_cells import Cell

Call = tuple[Cell, tuple[str, ...]]
"""A shape and mask, with arguments of `ejkernel tune` that a `Cell` has no word for."""


def triton() -> Iterator[Call]:
    dropout = ("-o", "dropout_prob=0.1", "--shape", "dropout_seed=:uint32")
    yield Cell(), ()
    yield Cell(causal=False), ()
    yield Cell(length=32768, num_packed=22), ()
    yield Cell(window=1024), ()
    for length in (32768, 2048):
        for causal in (True, False):
            yield Cell(length=length, causal=causal), ()
        yield Cell(length=length, window=1024), ()
    yield Cell(soft_cap=30.0), ()
    yield Cell(), dropout
    for causal in (True, False):
        for length in (8192, 32768):
            yield Cell(heads=32, kv_heads=32, size=64, length=length, causal=causal), ()
            yield Cell(heads=8, kv_heads=8, size=256, length=length, causal=causal), ()
        yield Cell(causal=causal), ("--dtype", "float32")
        yield Cell(heads=32, kv_heads=32, size=64, causal=causal), ("--dtype", "float32")
    wide = functools.partial(Cell, heads=8, kv_heads=8, size=256)
    yield wide(soft_cap=30.0), ()
    yield wide(), dropout
    yield wide(length=32768, num_packed=22), ()


def pallas() -> Iterator[Call]:
    for size in (128, 64, 256):
        cell = functools.partial(Cell, heads=2048 // size, kv_heads=2048 // size, size=size)
        for length in (8192, 32768, 2048):
            yield cell(length=length), ()
            yield cell(length=length, causal=False), ()
            yield cell(length=length, window=1024), ()
        yield cell(length=32768, num_packed=16), ()
        yield cell(soft_cap=30.0), ()


CALLS = {"triton": triton, "pallas": pallas}


def arguments(platform: str, cell: Cell, extra: tuple[str, ...]) -> list[str]:
    """What follows `ejkernel tune`."""
    query = f"{cell.batch},{cell.length},{cell.heads},{cell.size}"
    given = ["flash_attention", "--platform", platform, "--shape", query, "-o", f"causal={cell.causal}", *extra]
    if "--dtype" not in extra:
        given += ["--dtype", "bfloat16"]
    if cell.window:
        given += ["-o", f"sliding_window=({cell.window - 1}, 0)"]
    if cell.soft_cap:
        given += ["-o", f"logits_soft_cap={cell.soft_cap}"]
    if cell.num_packed:
        given += ["--shape", f"cum_seqlens_q={cell.num_packed + 1}:int32"]
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=CALLS, nargs="?", default="pallas")
    parser.add_argument("--quick", action="store_true", help="one call")
    parser.add_argument("--shape", metavar="WORD", default="", help="calls whose name has it, as `D64` or `window`")
    parser.add_argument("--export", type=Path, help="folder of tables")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    with tempfile.TemporaryDirectory() as folder:
        store = ["--store", str(Path(folder, "store.json"))]
        export = ["--export", str(options.export)] if options.export else []
        calls = (call for call in CALLS[options.platform]() if options.shape in f"{call[0]} {' '.join(call[1])}")
        for cell, extra in itertools.islice(calls, 1 if options.quick else None):
            given = arguments(options.platform, cell, extra)
            print(f"\n$ ejkernel tune {' '.join(given)}", flush=True)
            ejkernel(["tune", *given, *store, *export], standalone_mode=False)


if __name__ == "__main__":
    main()
