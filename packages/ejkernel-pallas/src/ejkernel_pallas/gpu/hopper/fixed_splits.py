"""Folds the online softmaxes of fixed splits of a row's keys, in registers, with the same bits in every kernel.

    keys     |------ split 0 ------|------ split 1 ------|--- split 2 --|
    rows        m, l, acc   --fold-->   m, l, acc  --fold-->  m, l, acc      total: maximum, sum and accumulator

A kernel that computes all splits of a row, and one that reads their results from memory, call the same functions. Each
sum is one explicit multiply-add: a compiler could fuse either of two products with their sum.

Source: He et al. 2025, "Defeating nondeterminism in LLM inference" (a fixed split size).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, scf, vector

from ejkernel.arithmetic import LN2, cdiv
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    replace_registers,
    replace_row_values,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, THREADS_PER_WARPGROUP, WGMMA_M

THREADS_PER_WARP = 32
"""Threads of a warp."""
COLUMNS_PER_REGISTER = 2
"""Neighbouring columns of a row in one register pair of a tile."""


class RowTotals(NamedTuple):
    """The maximum and the sum of every row over the splits that have been folded, float32 [64].

    Attributes:
        row_max: Maximum, in base 2.
        row_sum: Sum of the weights relative to it.
    """

    row_max: Any
    row_sum: Any


class FoldWeights(NamedTuple):
    """The factors of a fold, float32 [64].

    Attributes:
        total: Factor of what has been folded.
        split: Factor of the split.
    """

    total: Any
    split: Any


def fold_rows(
    totals: RowTotals, row_max: jax.Array, row_sum: jax.Array, layout: Any = ROW_LAYOUT
) -> tuple[RowTotals, FoldWeights]:
    """Returns the totals with a split's maximum and sum, and the factors of the accumulators.

    A split without a key of a row has the initial maximum, which is finite, and a sum of 0: it leaves all bits of the
    totals. `layout` is the layout of all vectors.
    """
    new_max = jnp.maximum(totals.row_max, row_max)
    weights = FoldWeights(jnp.exp2(totals.row_max - new_max), jnp.exp2(row_max - new_max))
    return RowTotals(new_max, multiply_add(totals.row_sum, row_sum, weights, layout)), weights


def fold_tiles(total: jax.Array, tile: jax.Array, weights: FoldWeights) -> jax.Array:
    """Returns `total * weights.total + tile * weights.split` of tiles [64, N] in registers."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def fold(_: Any, total: Any, tile: Any, of_total: Any, of_split: Any) -> Any:
        factors = _factors_by_row(of_total, of_split)
        pairs = zip(total.registers.flat, tile.registers.flat, strict=True)
        return replace_registers(tile, [_fold_registers(x, y, factors[n % 2]) for n, (x, y) in enumerate(pairs)])

    return fold(total, tile, weights.total, weights.split)  # pyright: ignore[reportCallIssue]


def thread_tile_shape(columns: int, num_rows: int = WGMMA_M) -> tuple[int, ...]:
    """Returns the shape of memory for a tile [64, columns] that no thread but its owner reads: each thread has every
    128th pair of numbers, so that accesses need no barrier and have no bank conflict.

    The memory has the rows of the warps that have some of the first `num_rows`; other rows are neither read nor
    written.
    """
    pairs_per_thread = WGMMA_M * columns // (THREADS_PER_WARPGROUP * COLUMNS_PER_REGISTER)
    return pairs_per_thread, cdiv(num_rows, ROWS_PER_WARP) * THREADS_PER_WARP, COLUMNS_PER_REGISTER


def zero_thread_tile(memory: Any) -> None:
    """Writes zeros to a tile in memory of the threads."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_: Any, memory: Any) -> None:
        vector_type = ir.VectorType.get((2,), ir.F32Type.get())
        zeros = vector.from_elements(vector_type, [float32_constant(0.0)] * 2)
        with _if_thread_has_rows(memory):
            _for_each_slot(memory, lambda n, index: vector.store(zeros, memory, index))

    store(memory)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fold_into_thread_tile(memory: Any, tile: jax.Array, weights: FoldWeights, is_first: bool = False) -> None:
    """Folds a tile in registers into the total in memory of the threads, which is taken as zeros if it is the first."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT))
    def fold(_: Any, memory: Any, tile: Any, of_total: Any, of_split: Any) -> None:
        factors, registers = _factors_by_row(of_total, of_split), list(tile.registers.flat)

        def fold_slot(n: int, index: list[Any]) -> None:
            zeros = vector.from_elements(registers[n].type, [float32_constant(0.0)] * 2)
            total = zeros if is_first else vector.load(registers[n].type, memory, index)
            vector.store(_fold_registers(total, registers[n], factors[n % 2]), memory, index)

        with _if_thread_has_rows(memory):
            _for_each_slot(memory, fold_slot)

    fold(memory, tile, weights.total, weights.split)  # pyright: ignore[reportCallIssue]


def folded_thread_tile(memory: Any, tile: jax.Array, weights: FoldWeights) -> jax.Array:
    """Returns the total in memory of the threads with a further tile, in registers; rows that the memory does not have
    are undefined.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def fold(_: Any, memory: Any, tile: Any, of_total: Any, of_split: Any) -> Any:
        factors, registers = _factors_by_row(of_total, of_split), list(tile.registers.flat)
        results: list[Any] = []

        def fold_slot(n: int, index: list[Any]) -> None:
            total = vector.load(registers[n].type, memory, index)
            results.append(_fold_registers(total, registers[n], factors[n % 2]))

        # Threads without rows fold what others have, which is in bounds.
        _for_each_slot(memory, fold_slot)
        return replace_registers(tile, results)

    return fold(memory, tile, weights.total, weights.split)  # pyright: ignore[reportCallIssue]


def synchronize_warpgroup() -> None:
    """Waits for all threads of the warpgroup."""

    @plgpu.inline_mgpu()
    def synchronize(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    synchronize()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def log_sum_exp(totals: RowTotals, layout: Any = ROW_LAYOUT) -> jax.Array:
    """Returns the natural logarithm of the sum of exponentials of every row, -inf for rows without a key."""

    @plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(totals.row_max.shape, jnp.float32, layout=layout),
    )
    def compute(_: Any, row_max: Any, row_sum: Any) -> Any:
        f32, results = ir.F32Type.get(), []
        columns = ([unpack_row_value(x) for x in rows.registers.flat] for rows in (row_max, row_sum))
        for top, total in zip(*columns, strict=True):
            log2_sum: Any = llvm.inline_asm(f32, [total], "lg2.approx.ftz.f32 $0, $1;", "=f,f")
            results.append(arith.mulf(arith.addf(top, log2_sum), float32_constant(LN2)))
        return replace_row_values(row_max, results)

    has_keys = totals.row_sum > 0
    return jnp.where(has_keys, compute(totals.row_max, jnp.where(has_keys, totals.row_sum, 1)), -jnp.inf)  # pyright: ignore[reportCallIssue]


def output_scale(totals: RowTotals, value_scale: float) -> jax.Array:
    """Returns the factor on the accumulator of every row."""
    return value_scale / jnp.where(totals.row_sum > 0, totals.row_sum, 1)


def multiply_add(total: jax.Array, split: jax.Array, weights: FoldWeights, layout: Any) -> jax.Array:
    """Returns `total * weights.total + split * weights.split` of vectors with a number per thread and register."""

    @plgpu.inline_mgpu(
        arg_types=(layout,) * 4, return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout)
    )
    def add(_: Any, total: Any, split: Any, of_total: Any, of_split: Any) -> Any:
        columns = ([unpack_row_value(x) for x in rows.registers.flat] for rows in (total, split, of_total, of_split))
        sums = [math.fma(x, a, arith.mulf(y, b)) for x, y, a, b in zip(*columns, strict=True)]
        return replace_row_values(total, sums)

    return add(total, split, weights.total, weights.split)  # pyright: ignore[reportCallIssue]


def _factors_by_row(of_total: Any, of_split: Any) -> list[tuple[Any, Any]]:
    """Returns the factors of each of a thread's two rows."""
    both = ([unpack_row_value(x) for x in rows.registers.flat] for rows in (of_total, of_split))
    return list(zip(*both, strict=True))


def _fold_registers(total: Any, register: Any, factors: tuple[Any, Any]) -> Any:
    of_total, of_split = factors
    pairs = zip(unpack_pair(total), unpack_pair(register), strict=True)
    values = [math.fma(x, of_total, arith.mulf(y, of_split)) for x, y in pairs]
    return vector.from_elements(register.type, values)


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def _if_thread_has_rows(memory: Any) -> Iterator[None]:
    """Enters code for the threads of which the memory has rows."""
    num_threads = ir.MemRefType(memory.type).shape[1]
    if num_threads == THREADS_PER_WARPGROUP:
        yield
        return
    thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
    branch: Any = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, thread, int32_constant(num_threads)))
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def _for_each_slot(memory: Any, function: Callable[[int, list[Any]], Any]) -> None:
    """Calls a function with the number of each of a thread's pairs and its index in memory."""
    index_type = ir.IndexType.get()
    thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(ir.MemRefType(memory.type).shape[1]))
    thread, zero = arith.index_cast(index_type, thread), arith.index_cast(index_type, int32_constant(0))
    for n in range(ir.MemRefType(memory.type).shape[0]):
        function(n, [arith.index_cast(index_type, int32_constant(n)), thread, zero])
