"""Helpers for tiles and vectors of one tile of scores in the registers of a warpgroup."""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.gpu.hopper.layouts import COLUMN_LAYOUT, ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type, replace_registers, unpack_row_value
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, WARPS_PER_WARPGROUP, WGMMA_M


def broadcast_to_columns(row_values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts a value per row over all columns."""
    return lax.broadcast_in_dim(row_values, shape, [0])


def broadcast_to_rows(column_values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts a value per column over all rows."""
    return lax.broadcast_in_dim(column_values, shape, [1])


def fill_row_vector(num_rows: int, value: float) -> jax.Array:
    """Returns the same value for every row of a tile."""
    return plgpu.layout_cast(jnp.full((num_rows,), value, jnp.float32), ROW_LAYOUT)


def zero_tile(shape: tuple[int, int]) -> jax.Array:
    """Returns a tile of zeros."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA)


def load_row_vector(vector: Any) -> jax.Array:
    """Loads a value per row from shared memory."""
    return load_with_layout(vector, ROW_LAYOUT)


def load_column_vector(vector: Any) -> jax.Array:
    """Loads a value per column from shared memory."""
    return load_with_layout(vector, COLUMN_LAYOUT)


def load_with_layout(vector: Any, layout: Any) -> jax.Array:
    """Loads an array from memory in a layout, element by element if necessary."""
    # JAX 0.10 requires an index, which is deprecated in 0.11 and removed in 0.12.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    index_argument = {} if index is None or index.default is not inspect.Parameter.empty else {"idx": ()}
    return plgpu.load(vector, **index_argument, layout=layout, optimized=False)


def widen_to_float32(tile: jax.Array) -> jax.Array:
    """Returns a tile in float32.

    For bfloat16 it splits registers into halves by integer instructions: LLVM would keep the halves in addition to the
    packed pairs that products need, and there are too few registers for both.
    """
    if tile.dtype != jnp.bfloat16:
        return tile.astype(jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def split_bfloat16_pairs(_: Any, bfloat16_tile: Any) -> Any:
        f32 = ir.F32Type.get()
        new_registers: list[Any] = []
        for register in bfloat16_tile.registers.flat:
            # bfloat16 is the upper half of a float32: the first element of a pair is shifted there; the second is
            # there, and the first is masked out.
            word = unpack_row_value(vector.bitcast(ir.VectorType.get((1,), int32_type()), register))
            halves = (arith.shli(word, int32_constant(16)), arith.andi(word, int32_constant(-(2**16))))
            new_registers.append(
                vector.from_elements(ir.VectorType.get((2,), f32), [arith.bitcast(f32, x) for x in halves])
            )
        return replace_registers(bfloat16_tile, new_registers)

    return split_bfloat16_pairs(tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_score_tile(tile: Any) -> jax.Array:
    """Loads a tile of scores from shared memory."""
    return load_with_layout(tile, plgpu.Layout.WGMMA)


def load_first_rows(tile: Any, num_rows: int) -> jax.Array:
    """Loads a float or 16-bit tile [64, N] from global memory, of which the first `num_rows` rows are valid.

    Warps whose rows are all invalid load nothing and return 0, which saves the bandwidth of padding.
    """
    if num_rows > WGMMA_M - ROWS_PER_WARP:
        return load_score_tile(tile)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()),),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, ref: Any) -> Any:
        element_type = ir.MemRefType(ref.type).element_type
        zero_constant = arith.constant(element_type, ir.FloatAttr.get(element_type, 0.0))
        zeros = mgpu.FragmentedArray.splat(zero_constant, tuple(tile.shape), layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        load_or_zero: Any = scf.IfOp(_warp_has_rows(num_rows), [x.type for x in zeros.registers.flat], has_else=True)
        with ir.InsertionPoint(load_or_zero.then_block):
            loaded_tile = mgpu.FragmentedArray.load_untiled(ref, layout=mgpu.WGMMA_LAYOUT, swizzle=16, optimized=False)
            scf.yield_(list(loaded_tile.registers.flat))
        with ir.InsertionPoint(load_or_zero.else_block):
            scf.yield_(list(zeros.registers.flat))
        return replace_registers(zeros, list(load_or_zero.results))

    return load(tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_tile(target: Any, tile: jax.Array) -> None:
    """Stores a tile [64, N] in global memory.

    Four threads store 16 bytes of a row of 16-bit elements at a time. JAX 0.12 refuses an assignment to `target`, which
    requires stores of whole sectors of 32 bytes.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), plgpu.Layout.WGMMA))
    def store(_: Any, ref: Any, tile: Any) -> None:
        tile.store_untiled(ref, optimized=False)

    store(target, tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_first_rows(target: Any, tile: jax.Array, num_rows: int) -> None:
    """Stores the first rows of a tile [64, N] in global memory, and up to 15 later rows; the remaining rows are not
    written.
    """
    if num_rows > WGMMA_M - ROWS_PER_WARP:
        store_tile(target, tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), plgpu.Layout.WGMMA))
    def store(_: Any, ref: Any, tile: Any) -> None:
        # Threads store independently, without a barrier inside, so warps may diverge.
        load_or_zero: Any = scf.IfOp(_warp_has_rows(num_rows))
        with ir.InsertionPoint(load_or_zero.then_block):
            tile.store_untiled(ref, optimized=False)
            scf.yield_([])

    store(target, tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_row_range(target: Any, tile: jax.Array, first_row: Any, num_rows: int) -> None:
    """Stores some rows of a tile [64, N] in the same rows of global memory; the other rows are neither written, nor
    need to exist.

    Args:
        target: Reference to [64, N].
        tile: The tile.
        first_row: The first row that is stored, int32.
        num_rows: Rows that are stored.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, ref: Any, tile: Any, first: Any) -> None:
        registers, index = list(tile.registers.flat), ir.IndexType.get()
        lane = arith.remui(mgpu.utils.thread_idx(), int32_constant(4))
        for half, row, stores_row in _stored_rows(first.registers.item(), num_rows):
            branch: Any = scf.IfOp(stores_row)
            with ir.InsertionPoint(branch.then_block):
                for n, register in enumerate(registers[half::2]):
                    column = arith.addi(arith.muli(lane, int32_constant(2)), int32_constant(8 * n))
                    vector.store(register, ref, [arith.index_cast(index, x) for x in (row, column)])
                scf.yield_([])

    store(target, tile, first_row)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_row_vector_range(target: Any, rows: jax.Array, first_row: Any, num_rows: int) -> None:
    """Stores some of a value per row of a tile in the same elements of global memory; as `store_row_range`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), ROW_LAYOUT, plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, ref: Any, rows: Any, first: Any) -> None:
        values, index = [unpack_row_value(x) for x in rows.registers.flat], ir.IndexType.get()
        for half, row, stores_row in _stored_rows(first.registers.item(), num_rows):
            # The four threads of a row store the same value.
            branch: Any = scf.IfOp(stores_row)
            with ir.InsertionPoint(branch.then_block):
                memref.store(values[half], ref, [arith.index_cast(index, row)])
                scf.yield_([])

    store(target, rows, first_row)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _stored_rows(first_row: Any, num_rows: int) -> Iterator[tuple[int, Any, Any]]:
    """Yields each of a thread's two rows of a tile: its number, the row, and whether it is in the range."""
    lane = arith.remui(mgpu.utils.thread_idx(), int32_constant(32))
    warp = arith.remui(mgpu.utils.warp_idx(sync=False), int32_constant(WARPS_PER_WARPGROUP))
    row = arith.addi(arith.muli(warp, int32_constant(ROWS_PER_WARP)), arith.divui(lane, int32_constant(4)))
    for half in (0, 1):
        at = arith.addi(row, int32_constant(8 * half))
        # Rows before the first one are large without a sign.
        distance = arith.subi(at, first_row)
        yield half, at, arith.cmpi(arith.CmpIPredicate.ult, distance, int32_constant(num_rows))


def store_16_byte_rows(target: Any, tile: jax.Array) -> None:
    """Stores a 16-bit tile [64, N], N a multiple of 32, in global memory, 16 bytes of a row per thread.

    Four neighbouring threads have two columns each of every eight: they exchange them, so that each has all of one
    eight of four. A quarter of the stores is left, and each writes whole sectors.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), plgpu.Layout.WGMMA))
    def store(_: Any, ref: Any, tile: Any) -> None:
        lane = arith.remui(mgpu.utils.thread_idx(), int32_constant(32))
        warp = arith.remui(mgpu.utils.warp_idx(sync=False), int32_constant(WARPS_PER_WARPGROUP))
        lane_in_quad, index = arith.remui(lane, int32_constant(4)), ir.IndexType.get()
        row = arith.addi(arith.muli(warp, int32_constant(ROWS_PER_WARP)), arith.divui(lane, int32_constant(4)))
        vector_type = ir.VectorType.get((8,), ir.MemRefType(ref.type).element_type)
        words = [
            unpack_row_value(vector.bitcast(ir.VectorType.get((1,), int32_type()), x)) for x in tile.registers.flat
        ]
        # Registers alternate between a thread's two rows, which are eight apart.
        for half in (0, 1):
            row_words, at = words[half::2], arith.index_cast(index, arith.addi(row, int32_constant(8 * half)))
            for first in range(0, len(row_words), 4):
                row_piece = vector.from_elements(
                    ir.VectorType.get((4,), int32_type()), _transpose_words(row_words[first : first + 4], lane_in_quad)
                )
                column = arith.index_cast(
                    index, arith.addi(arith.muli(lane_in_quad, int32_constant(8)), int32_constant(8 * first))
                )
                vector.store(vector.bitcast(vector_type, row_piece), ref, [at, column])

    store(target, tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _transpose_words(words: list[Any], lane_in_quad: Any) -> list[Any]:
    """Transposes words among four threads: word n becomes word `lane_in_quad` of thread n, by two exchanges."""
    for distance in (1, 2):
        is_bit_set = arith.cmpi(
            arith.CmpIPredicate.ne, arith.andi(lane_in_quad, int32_constant(distance)), int32_constant(0)
        )
        for low in (0, 3 - distance):
            words[low], words[low + distance] = _exchange_words(words[low], words[low + distance], is_bit_set, distance)
    return words


def _exchange_words(low_word: Any, high_word: Any, is_bit_set: Any, lane_distance: int) -> tuple[Any, Any]:
    """Threads with the bit set keep their high word and send the low one; the others do the reverse."""
    got = mgpu.utils.shfl_bfly(arith.select(is_bit_set, low_word, high_word), lane_distance)
    return arith.select(is_bit_set, got, low_word), arith.select(is_bit_set, high_word, got)


def _warp_has_rows(num_rows: int) -> Any:
    """Returns whether this thread's warp has any of the first rows of a tile: warp w has rows 16 w to 16 w + 15."""
    warp = arith.remui(mgpu.utils.warp_idx(sync=False), int32_constant(WARPS_PER_WARPGROUP))
    return arith.cmpi(arith.CmpIPredicate.ult, warp, int32_constant(cdiv(num_rows, ROWS_PER_WARP)))
