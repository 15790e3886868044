"""Masks of one tile of scores: a range of columns for every row, and equal segment ids."""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    as_int32,
    int32_constant,
    int32_type,
    replace_registers,
    replace_row_values,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.hopper.sizes import THREADS_PER_WARPGROUP, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.spec import COLUMNS_PER_MASK_WORD_SPAN, WORD_BITS, HopperSpec

UNREACHABLE_COLUMN = 2**30


class UnsortedKeys(NamedTuple):
    """Segment ids or positions that are not sorted, so that the keys of a query are not contiguous.

    Attributes:
        is_unsorted: Whether they are unsorted, int32 [rows], the same for all rows.
        rows: References to int32 [rows] in device memory: to the id that a column must have, or to the first and the
            last position that it may have.
        columns: Reference to int32 [columns], their ids or positions.
    """

    is_unsorted: Any
    rows: tuple[Any, ...]
    columns: Any


def key_column_range(
    spec: HopperSpec, num_rows: int, first_query: Any, first_key: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the first and last column, int32 [rows], that each row may attend to; None if there is no limit.

    Args:
        spec: The kernel's constants.
        num_rows: Queries of the tile, its rows.
        first_query: Index of its first query.
        first_key: Index of its first key.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=ROW_LAYOUT) + (first_query - first_key)
    low = None if spec.left_window is None else row - spec.left_window
    last = spec.kv_len - 1 - first_key
    return low, jnp.full((num_rows,), last, jnp.int32) if spec.right_window is None else jnp.minimum(
        row + spec.right_window, last
    )


def paged_key_column_range(
    spec: HopperSpec, num_rows: int, paged_tile: Any, first_key: Any
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the same for a tile whose sequence has its own positions and limits (`forward_call.PagedTile`)."""
    row = plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=ROW_LAYOUT) + (paged_tile.first_position - first_key)
    low = None
    if spec.masks_before_full_tiles:
        low = jnp.full((num_rows,), paged_tile.first_key - first_key, jnp.int32)
        low = low if spec.left_window is None else jnp.maximum(row - spec.left_window, low)
    last = paged_tile.key_end - 1 - first_key
    return low, jnp.full((num_rows,), last, jnp.int32) if spec.right_window is None else jnp.minimum(
        row + spec.right_window, last
    )


def query_column_range(
    spec: HopperSpec, num_rows: int, first_query: Any, first_key: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the first and last attending column of each row, where keys are a tile's rows and queries its columns."""
    row = plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=ROW_LAYOUT) + (first_key - first_query)
    low = jnp.full((num_rows,), 0, jnp.int32) if spec.right_window is None else row - spec.right_window
    # Rows past the last key attend to no column.
    low = jnp.where(row < spec.kv_len - first_query, low, UNREACHABLE_COLUMN)
    return low, None if spec.left_window is None else row + spec.left_window


def load_mask_words(mask_words_ref: Any, first_row: Any, num_columns: int) -> tuple[jax.Array, ...]:
    """Loads the words that a thread tests of 64 rows of a tile mask: per span of columns one for each of its two rows.

    Each is int32 [64], a vector of rows in which the four threads of a row have different words.

    Args:
        mask_words_ref: Reference to a mask's words in device memory, int32 [rows * spans * 4].
        first_row: The first of the 64 rows.
        num_columns: Columns.
    """
    spans = cdiv(num_columns, COLUMNS_PER_MASK_WORD_SPAN)
    row_template = plgpu.layout_cast(jnp.full((WGMMA_M,), 0, jnp.int32), ROW_LAYOUT)
    first = lax.broadcast_in_dim(jnp.asarray(first_row, jnp.int32), (WGMMA_M,), ())

    def load_span_words(span_index: int) -> jax.Array:
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), ROW_LAYOUT, ROW_LAYOUT),
            return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.int32, layout=ROW_LAYOUT),
        )
        def load_word_registers(_: Any, source: Any, row_template: Any, start: Any) -> Any:
            # Each thread loads its own words: the four of a row have different columns.
            words_row = arith.addi(unpack_row_value(start.registers.flat[0]), _first_row_of_thread())
            thread = arith.andi(mgpu.utils.thread_idx(), int32_constant(3))
            loaded_words: list[Any] = []
            for half in (0, 1):
                place = arith.muli(arith.addi(words_row, int32_constant(8 * half)), int32_constant(4 * spans))
                loaded_words.append(
                    _load_id(source, arith.addi(place, arith.addi(thread, int32_constant(4 * span_index))))
                )
            return replace_row_values(row_template, loaded_words)

        return load_word_registers(mask_words_ref, row_template, plgpu.layout_cast(first, ROW_LAYOUT))  # pyright: ignore[reportCallIssue]

    return tuple(load_span_words(span_index) for span_index in range(spans))


def mask_outside_key_range(
    scores: jax.Array,
    first_columns: jax.Array | None,
    last_columns: jax.Array | None,
    unsorted_keys: UnsortedKeys | None = None,
    pattern_words: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Returns scores with -inf in columns before `first_columns` and after `last_columns`, both int32 per row.

    If `unsorted_keys` is set, also where the id or position of the column is not one of the row's; and where the words
    of a pattern have no bits.

    The columns that a thread keeps of a row are bits of a word, from which the assembler makes seven predicates at a
    time; comparisons would be two or three per score, which is more than its exponential takes.
    """
    if first_columns is None and last_columns is None and unsorted_keys is None and not pattern_words:
        return scores
    has_limit = [limit is not None for limit in (first_columns, last_columns)]
    limits = [plgpu.layout_cast(limit, ROW_LAYOUT) for limit in (first_columns, last_columns) if limit is not None]
    refs = () if unsorted_keys is None else (*unsorted_keys.rows, unsorted_keys.columns)
    needs_compare = () if unsorted_keys is None else (plgpu.layout_cast(unsorted_keys.is_unsorted, ROW_LAYOUT),)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            *(plgpu.RefType() for _ in refs),
            *(ROW_LAYOUT for _ in (*needs_compare, *limits, *pattern_words)),
        ),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=plgpu.Layout.WGMMA),
    )
    def mask_registers(_: Any, tile: Any, *inputs: Any) -> Any:
        ids, limit_vectors = inputs[: len(refs) + len(needs_compare)], iter(inputs[len(refs) + len(needs_compare) :])
        bounds = [
            [unpack_row_value(register) for register in next(limit_vectors).registers.flat]
            if is_given
            else (None, None)
            for is_given in has_limit
        ]
        numbers = range(cdiv(scores.shape[1], COLUMNS_PER_MASK_WORD_SPAN))
        # Ranges, ids and patterns are first converted to words, so that a single bit masks a score.
        words = [
            [_column_range_word(number, low, high) for number in numbers] for low, high in zip(*bounds, strict=True)
        ]
        if unsorted_keys is not None:
            words = _mask_other_keys(words, ids, scores.shape[1])
        for span, bits in enumerate(limit_vectors):
            for half, register in enumerate(bits.registers.flat):
                words[half][span] = arith.andi(words[half][span], unpack_row_value(register))
        return _mask_by_words(tile, words)

    operands = *refs, *needs_compare, *limits, *pattern_words
    return mask_registers(scores, *operands)


def mask_outside_query_range(
    scores: jax.Array,
    first_columns: jax.Array,
    last_columns: jax.Array | None,
    row_and_column_ids: tuple[jax.Array, Any] | None = None,
    pattern_words: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Returns scores as `mask_outside_key_range` does, without registers for words: columns are constants of the
    instructions that compare.

    For the backward kernel, whose registers are full: with words, the assembler serialises the products of head
    dimension 64. It also does with a branch on whether ids are compared; so they always are, with those of columns read
    from shared memory.

    Args:
        scores: Float32 [rows, columns].
        first_columns: As in `mask_outside_key_range`.
        last_columns: As in `mask_outside_key_range`.
        row_and_column_ids: Segment ids of rows, and a reference to those of columns.
        pattern_words: Words from `load_mask_words`.
    """
    if pattern_words:
        scores = mask_outside_key_range(scores, None, None, pattern_words=pattern_words)
    limits = [plgpu.layout_cast(limit, ROW_LAYOUT) for limit in (first_columns, last_columns) if limit is not None]
    comparison_instructions = ["setp.le", "setp.ge"][: len(limits)]
    row_ids, refs = (
        () if row_and_column_ids is None else (plgpu.layout_cast(row_and_column_ids[0], ROW_LAYOUT),),
        () if row_and_column_ids is None else (row_and_column_ids[1],),
    )

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(plgpu.RefType() for _ in refs), *(ROW_LAYOUT for _ in (*limits, *row_ids))),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=plgpu.Layout.WGMMA),
    )
    def mask_registers(_: Any, tile: Any, *inputs: Any) -> Any:
        column_ids, rows = (
            inputs[: len(refs)],
            [[unpack_row_value(x) for x in row.registers.flat] for row in inputs[len(refs) :]],
        )
        return _mask_columns(tile, comparison_instructions, rows, *column_ids)

    return mask_registers(scores, *refs, *limits, *row_ids)


def _mask_columns(
    tile: Any, comparison_instructions: list[str], row_values: list[list[Any]], column_ids: Any = None
) -> Any:
    """Returns a tile with -inf in the columns outside of each row's limits, and where column ids differ."""
    place = first_column_of_thread()
    # Relative to the thread's first column, so that columns are constants of the instructions.
    limits = [[arith.subi(limit, place) for limit in both] for both in row_values[: len(comparison_instructions)]]
    comparison_instructions = [
        f"{comparison}{'.and' * (n > 0)}.s32 p, ${n + 3}, $2{', p' * (n > 0)};"
        for n, comparison in enumerate(comparison_instructions)
    ]
    if column_ids is not None:
        comparison_instructions.append(f"setp.eq.and.s32 p, ${len(limits) + 3}, ${len(limits) + 4}, p;")
    code = f"{{ .reg .pred p; {' '.join(comparison_instructions)} selp.f32 $0, $1, 0fFF800000, p; }}"
    registers: list[Any] = []
    for number, register in enumerate(tile.registers.flat):
        column_group, half = divmod(number, 2)
        masked_registers: list[Any] = []
        for n, score in enumerate(unpack_pair(register)):
            operands = [score, int32_constant(column_group * 8 + n), *(limit[half] for limit in limits)]
            if column_ids is not None:
                operands += [
                    row_values[-1][half],
                    _load_id(column_ids, arith.addi(place, int32_constant(column_group * 8 + n))),
                ]
            constraints = "=f,f,n" + ",r" * (len(operands) - 2)
            masked_registers.append(
                llvm.inline_asm(ir.F32Type.get(), operands, code, constraints, has_side_effects=False)
            )
        registers.append(vector.from_elements(register.type, masked_registers))
    return replace_registers(tile, registers)


def _column_range_word(span_index: int, low: Any, high: Any) -> Any:
    """Returns the bits of the columns from `low` to `high` among those of a thread in one row: two of every eight."""
    before = (
        int32_constant(0)
        if low is None
        else _count_thread_columns_up_to(span_index, arith.subi(low, int32_constant(1)))
    )
    bits_to_last = int32_constant(WORD_BITS) if high is None else _count_thread_columns_up_to(span_index, high)
    count = arith.maxsi(arith.subi(bits_to_last, before), int32_constant(0))
    # `bmsk` makes a run of ones from a start and a length, and clamps both: no branch for empty or full words.
    return llvm.inline_asm(
        int32_type(), [before, count], "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", has_side_effects=False
    )


def _count_thread_columns_up_to(span_index: int, last_column: Any) -> Any:
    """Returns how many of a thread's columns in a word are at or before a column of the tile."""
    last_column = arith.subi(
        last_column, arith.addi(first_column_of_thread(), int32_constant(span_index * COLUMNS_PER_MASK_WORD_SPAN))
    )
    last_column = arith.minsi(
        arith.maxsi(last_column, int32_constant(-1)), int32_constant(COLUMNS_PER_MASK_WORD_SPAN - 1)
    )
    # Two columns of every eight: whole eights count two each, and the last one those at or before the column.
    pairs, rest = arith.shrsi(last_column, int32_constant(3)), arith.andi(last_column, int32_constant(7))
    return arith.addi(arith.addi(pairs, pairs), arith.minsi(arith.addi(rest, int32_constant(1)), int32_constant(2)))


def first_column_of_thread() -> Any:
    """Returns the first of a thread's columns; its index among four threads selects two of every eight columns."""
    return arith.muli(arith.andi(mgpu.utils.thread_idx(), int32_constant(3)), int32_constant(2))


def _first_row_of_thread() -> Any:
    """Returns the first of a thread's two rows of 64; the other one is eight rows later."""
    thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
    return arith.addi(
        arith.muli(arith.divui(thread, int32_constant(32)), int32_constant(16)),
        arith.divui(arith.remui(thread, int32_constant(32)), int32_constant(4)),
    )


def _mask_other_keys(words: list[list[Any]], ids: tuple[Any, ...], num_columns: int) -> list[list[Any]]:
    """Clears the bits of columns whose ids or positions are not among the row's, if a flag is set."""
    (*rows, columns, needs_compare), all_registers, count = ids, [*words[0], *words[1]], len(words[0])
    is_set = arith.cmpi(arith.CmpIPredicate.ne, unpack_row_value(needs_compare.registers.flat[0]), int32_constant(0))
    # A uniform branch: ids or positions are loaded only if they are unsorted.
    branch: Any = scf.IfOp(is_set, [int32_type()] * len(all_registers), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        same = _attending_key_words(rows, columns, num_columns)
        scf.yield_([arith.andi(word, other) for word, other in zip(all_registers, same, strict=True)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(all_registers)
    results = list(branch.results)
    return [results[:count], results[count:]]


def _attending_key_words(rows: list[Any], columns: Any, num_columns: int) -> list[Any]:
    """Returns bits of the columns with the ids of a thread's rows, or with positions between their limits: the words
    of the first row, then of the second.
    """
    row = _first_row_of_thread()
    values = [[_load_id(ref, arith.addi(row, int32_constant(8 * half))) for ref in rows] for half in (0, 1)]
    words = [[int32_constant(0)] * cdiv(num_columns, COLUMNS_PER_MASK_WORD_SPAN) for _ in values]
    for place in range(num_columns // 4):
        column_group, n = divmod(place, 2)
        column = _load_id(columns, arith.addi(first_column_of_thread(), int32_constant(column_group * 8 + n)))
        word, bit = divmod(place, WORD_BITS)
        for words_row, row_values in zip(words, values, strict=True):
            attends = _is_key_of_row(row_values, column)
            words_row[word] = arith.ori(
                words_row[word], arith.select(attends, int32_constant(as_int32(1 << bit)), int32_constant(0))
            )
    return [*words[0], *words[1]]


def _is_key_of_row(row_values: list[Any], column: Any) -> Any:
    """Returns whether a column has the row's id, or a position between the row's limits."""
    if len(row_values) == 1:
        return arith.cmpi(arith.CmpIPredicate.eq, row_values[0], column)
    low, high = row_values
    return arith.andi(
        arith.cmpi(arith.CmpIPredicate.sle, low, column), arith.cmpi(arith.CmpIPredicate.sle, column, high)
    )


def _load_id(ids: Any, index: Any) -> Any:
    return memref.load(ids, [arith.index_cast(ir.IndexType.get(), index)])


def _mask_by_words(tile: Any, words: list[list[Any]]) -> Any:
    """Returns a tile with -inf where the words have no bits. A thread has two rows and, of every eight columns, two."""
    minus_infinity = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), -math.inf))
    registers: list[Any] = []
    for number, register in enumerate(tile.registers.flat):
        column_group, half = divmod(number, 2)
        masked_registers: list[Any] = []
        for n, score in enumerate(unpack_pair(register)):
            word, bit = divmod(2 * column_group + n, WORD_BITS)
            # The assembler turns tests of constant bits of one word into predicates, seven at a time.
            loaded_words = arith.andi(words[half][word], int32_constant(as_int32(1 << bit)))
            masked_registers.append(
                arith.select(arith.cmpi(arith.CmpIPredicate.ne, loaded_words, int32_constant(0)), score, minus_infinity)
            )
        registers.append(vector.from_elements(register.type, masked_registers))
    return replace_registers(tile, registers)
