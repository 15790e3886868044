"""Computes `score_mod` and `mask_mod` of a tile of scores, in registers.

The caller's function is a program of scalars. A thread computes what depends on a row only for each of its two rows,
what depends on a column only for each of its columns, and the remaining operations for every pair. What depends on the
difference of query and key is the same along a diagonal: a thread's second row is eight rows after its first one, so
two of its pairs share most diagonals, and 64 pairs have 34 of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.scalar_programs import ScalarProgram, loaded_arrays
from ejkernel_pallas.gpu.hopper import scalar_operations
from ejkernel_pallas.gpu.hopper.index_differences import nodes_of_difference, scaled_difference
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    replace_registers,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.kernels.tile_masks import first_column_of_thread
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

FIRST_INDICES = "pair_first_indices"
"""The operand with the index of each batch row in the whole call and, in a shard, those of its first head, query and
key.
"""
UNIFORM_INT32 = plgpu.Layout.WG_SPLAT(())
ROW_DISTANCE = 8
"""Rows from the first row of a thread to its second one."""
MAX_LENGTH_OF_EXACT_INDICES = 2**23
"""Sequences up to this length, and their padding, have indices and differences of them that float32 represents."""


@dataclasses.dataclass(frozen=True)
class PairTile:
    """A tile of scores, whose pairs the functions get.

    Attributes:
        operands: References to the kernel's operands.
        batch_row: Index of the batch row in the operands.
        head: Index of the query head.
        first_query: Index of the tile's first query.
        first_key: Index of its first key.
        rows_are_queries: Whether queries are the tile's rows and keys its columns; otherwise it is transposed.
    """

    operands: dict[str, Any]
    batch_row: Any
    head: Any
    first_query: Any
    first_key: Any
    rows_are_queries: bool

    def array_refs(self, name: str, program: ScalarProgram) -> list[Any]:
        """Returns references to the arrays that a function loads elements of."""
        refs = [self.operands[_array_name(name, n)] for n in range(len(program.array_ranks))]
        return [ref.at[I32(0) if ref.shape[0] == 1 else self.batch_row] for ref in refs]

    def has_exact_indices(self, spec: HopperSpec) -> bool:
        """Returns whether float32 represents all indices, and differences of them: those of a shard have no bound."""
        first = self.operands.get(FIRST_INDICES)
        is_whole_call = first is None or first.shape[1] == 1
        return is_whole_call and max(spec.q_len, spec.kv_len) <= MAX_LENGTH_OF_EXACT_INDICES

    def indices(self) -> tuple[Any, ...]:
        """Returns the batch row, the head, the first row and the first column, by their indices in the whole call."""
        indices = [self.batch_row, self.head, self.first_query, self.first_key]
        if (first := self.operands.get(FIRST_INDICES)) is not None:
            batch_row, *offsets = (first[self.batch_row, n] for n in range(first.shape[1]))
            # Without offsets the call is no shard of another one.
            indices = [batch_row, *(x + offset for x, offset in zip(indices[1:], offsets or [0] * 3, strict=True))]
        return tuple(indices if self.rows_are_queries else [indices[n] for n in (0, 1, 3, 2)])


def pair_operands(record: TiledAttention, spec: HopperSpec) -> dict[str, jax.Array]:
    """Returns the operands that the functions of a record read: each array that they load elements of, [1, ...]."""
    operands: dict[str, jax.Array] = {}
    for name in ("score_mod", "mask_mod"):
        function = getattr(record, name)
        for n, array in enumerate(() if function is None else loaded_arrays(function)):
            array = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
            operands[_array_name(name, n)] = array.reshape(1, *(array.shape or (1,)))
    read = frozenset().union(*(x.inputs_read for x in (spec.score_mod, spec.mask_mod) if x is not None))
    rows = jnp.asarray(np.arange(spec.batch_size, dtype=np.int32)[:, None])  # a constant needs no kernel
    if read and record.dropout_origin is not None:
        operands[FIRST_INDICES] = jnp.pad(rows, ((0, 0), (0, 3))) + record.dropout_origin.astype(jnp.int32)
    elif "b" in read:
        operands[FIRST_INDICES] = rows
    return operands


def modify_scores(spec: HopperSpec, scores: jax.Array, tile: PairTile) -> jax.Array:
    """Returns scores after `score_mod`, if there is one, in units of `spec.modified_score_unit`, from products of
    queries and keys, or their tanh under a soft cap.
    """
    if spec.score_mod is None:
        return scores
    return _map_pairs(spec, scores, tile, "score_mod", spec.score_mod.result)


def multiply_by_slope(spec: HopperSpec, weights: jax.Array, scores: jax.Array, tile: PairTile) -> jax.Array:
    """Returns weights times the derivative of `score_mod` by the score, from the scores before it; 0 for a weight of
    zero, whatever the derivative is.
    """
    assert spec.score_mod is not None  # the caller looked
    assert spec.score_mod.slope is not None
    slopes = _map_pairs(spec, scores, tile, "score_mod", spec.score_mod.slope)
    return _zero_without_weight(weights, slopes)


def mask_pairs(spec: HopperSpec, scores: jax.Array, tile: PairTile) -> jax.Array:
    """Returns scores with -inf for pairs that `mask_mod`, if there is one, does not let attend."""
    if spec.mask_mod is None:
        return scores
    return _map_pairs(spec, scores, tile, "mask_mod", spec.mask_mod.result)


def _array_name(name: str, n: int) -> str:
    return f"{name}_array_{n}"


def _zero_without_weight(weights: jax.Array, slopes: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def multiply(_: Any, weights: Any, slopes: Any) -> Any:
        zero, registers = float32_constant(0.0), []
        for both in zip(weights.registers.flat, slopes.registers.flat, strict=True):
            pairs = zip(*map(unpack_pair, both), strict=True)
            products = [
                arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, weight, zero), zero, arith.mulf(weight, slope))
                for weight, slope in pairs
            ]
            registers.append(vector.from_elements(both[0].type, products))
        return replace_registers(weights, registers)

    return multiply(weights, slopes)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _map_pairs(spec: HopperSpec, scores: jax.Array, tile: PairTile, name: str, node: int) -> jax.Array:
    """Returns the value of a node for every pair of a tile.

    Args:
        spec: The kernel's constants.
        scores: Float32 [rows, columns], from products of queries and keys.
        tile: The tile.
        name: The function's name.
        node: The node of a number; or of a mask, for which scores are returned that are -inf where it is False.
    """
    program: ScalarProgram = getattr(spec, name)
    units = (None, 1.0) if name == "mask_mod" else (spec.score_unit, spec.modified_score_unit)
    options = ValueOptions(tile.rows_are_queries, tile.has_exact_indices(spec), *units)
    batch_row, head, first_row, first_column = (jnp.asarray(x, jnp.int32) for x in tile.indices())
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_M,), 0, layout=ROW_LAYOUT) + first_row
    refs = tile.array_refs(name, program)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            ROW_LAYOUT,
            *(UNIFORM_INT32 for _ in range(3)),
            *(plgpu.RefType() for _ in refs),
        ),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def compute(_: Any, scores: Any, rows: Any, batch_row: Any, head: Any, first_column: Any, *arrays: Any) -> Any:
        batch_row, head, first_column = (x.registers.item() for x in (batch_row, head, first_column))
        pairs = PairValues(
            program,
            arrays,
            {"b": batch_row, "h": head},
            [unpack_row_value(x) for x in rows.registers.flat],
            arith.addi(first_column, first_column_of_thread()),
            options,
        )
        return _map_registers(scores, functools.partial(_new_score, pairs, node))

    return compute(scores, row, batch_row, head, first_column, *refs)  # pyright: ignore[reportCallIssue]


def _new_score(pairs: "PairValues", node: int, row: int, column: int, score: Any) -> Any:
    if pairs.options.score_unit is None:
        # LLVM selects once for each operand of "and" and "or"; the assembler combines their comparisons in predicates.
        operands = pairs.compute(node, row, column, None), score
        code = "selp.f32 $0, $2, 0fFF800000, $1;"
        return llvm.inline_asm(ir.F32Type.get(), operands, code, "=f,b,f", has_side_effects=False)
    return pairs.compute(node, row, column, score)


def _map_registers(tile: Any, function: Callable[[int, int, Any], Any]) -> Any:
    """Returns a tile of a function of the row, of a thread's two, of the column, from its first one, and the element.

    A thread has two of every eight columns; registers alternate between its two rows.
    """
    registers: list[Any] = []
    for number, register in enumerate(tile.registers.flat):
        column_group, half = divmod(number, 2)
        values = [function(half, 8 * column_group + n, x) for n, x in enumerate(unpack_pair(register))]
        registers.append(vector.from_elements(register.type, values))
    return replace_registers(tile, registers)


@dataclasses.dataclass(frozen=True)
class ValueOptions:
    """How a program's values are computed.

    Attributes:
        rows_are_queries: Whether queries are the tile's rows and keys its columns; otherwise it is transposed.
        has_exact_indices: Whether float32 represents all indices, and differences of them.
        score_unit: Factor on the products, for the scores that the function gets; None for a mask.
        result_unit: The unit of the program's result.
    """

    rows_are_queries: bool
    has_exact_indices: bool
    score_unit: float | None
    result_unit: float = 1.0


class PairValues:
    """The values of a program's nodes for the pairs of a thread. What depends on one row, one column or one diagonal
    is computed once.

    Attributes:
        options: How they are computed.
    """

    def __init__(
        self,
        program: ScalarProgram,
        arrays: tuple[Any, ...],
        uniform: dict[str, Any],
        rows: list[Any],
        first_column: Any,
        options: ValueOptions,
    ) -> None:
        self._program, self._arrays, self._uniform = program, arrays, uniform
        self._rows, self._first_column = rows, first_column
        self._row_name, self._column_name = ("q_idx", "k_idx") if options.rows_are_queries else ("k_idx", "q_idx")
        self.options = options
        self._differences, self._of_difference = nodes_of_difference(program)
        self._known: dict[Any, Any] = {}

    def compute(self, result: int, row: int, column: int, product: Any) -> Any:
        """Returns the value of a node for a pair with a product of query and key."""
        of_pair: dict[int, Any] = {}

        def read(n: int) -> Any:
            return of_pair[n] if n in of_pair else self._known[self._key(n, row, column)]

        is_in_units = self.options.result_unit != 1 and result == self._program.result

        for n in self._program.live_nodes(result):
            key = self._key(n, row, column)
            if self._is_of_pair(n):
                if (factors := self._fused_product(n)) is not None:
                    of_pair[n] = self._multiply_add(n, factors, read)
                    continue
                if (score := self._fused_score(n)) is not None:
                    of_pair[n] = self._add_to_score(n, score, product, read)
                    continue
                of_pair[n] = self._value(n, [read(x) for x in self._program.nodes[n].operands], row, column, product)
            elif key not in self._known:
                operands = [read(x) for x in self._program.nodes[n].operands]
                self._known[key] = self._value(n, operands, row, column, product)
        return self._add_in_units(product, read) if is_in_units else read(result)

    def _add_in_units(self, product: Any, read: Callable[[int], Any]) -> Any:
        """Returns the result of a `scaled_difference` in units of the product's factor: one instruction per pair."""
        term = scaled_difference(self._program)
        assert term is not None  # otherwise the unit is 1
        if "factor" not in self._known:
            unit = -self.options.result_unit if term.is_subtracted else self.options.result_unit
            self._known["factor"] = arith.mulf(read(term.factor), float32_constant(1 / unit))
        return math_dialect.fma(read(term.difference), self._known["factor"], product)

    def _fused_product(self, n: int) -> int | None:
        """Returns the product that a sum of float32 adds: they are one instruction. An unused product is removed."""
        node, nodes = self._program.nodes[n], self._program.nodes
        if node.operation not in ("add", "sub") or node.dtype != "float32":
            return None
        products = [x for x in node.operands if nodes[x].operation == "mul" and self._is_of_pair(x)]
        return products[-1] if products else None

    def _multiply_add(self, n: int, product: int, read: Callable[[int], Any]) -> Any:
        """Returns the sum or difference of a product and another operand."""
        node, (x, y) = self._program.nodes[n], self._program.nodes[product].operands
        left, right = node.operands
        if node.operation == "add":
            return math_dialect.fma(read(x), read(y), read(left if right == product else right))
        if right == product:
            return math_dialect.fma(arith.negf(read(x)), read(y), read(left))
        return math_dialect.fma(read(x), read(y), arith.negf(read(right)))

    def _fused_score(self, n: int) -> int | None:
        """Returns the score that a sum adds to a value of the pair's indices: its scale and the sum are one
        instruction.
        """
        node, program = self._program.nodes[n], self._program
        if node.operation not in ("add", "sub") or node.dtype != "float32":
            return None
        scores = [x for x in node.operands if program.nodes[x].operation == "score"]
        others = [x for x in node.operands if x not in scores and program.reads[x] & {"q_idx", "k_idx"}]
        return scores[0] if others and "score" not in program.reads[others[0]] else None

    def _add_to_score(self, n: int, score: int, product: Any, read: Callable[[int], Any]) -> Any:
        """Returns the sum or difference of the score of a product and another operand."""
        node, unit = self._program.nodes[n], float32_constant(self._unit())
        left, right = node.operands
        if node.operation == "add":
            return math_dialect.fma(product, unit, read(left if right == score else right))
        if left == score:
            return math_dialect.fma(product, unit, arith.negf(read(right)))
        return math_dialect.fma(arith.negf(product), unit, read(left))

    def _unit(self) -> float:
        assert self.options.score_unit is not None  # a mask reads no score
        return self.options.score_unit

    def _is_of_pair(self, n: int) -> bool:
        reads = self._program.reads[n]
        if n in self._of_difference and self._program.nodes[n].dtype != "bool":  # there are few predicates to keep
            return False
        return "score" in reads or reads >= {"q_idx", "k_idx"}

    def _key(self, n: int, row: int, column: int) -> tuple[Any, ...]:
        if n in self._of_difference:
            return n, "diagonal", self._diagonal(row, column)
        reads = self._program.reads[n]
        return n, row if self._row_name in reads else None, column if self._column_name in reads else None

    def _diagonal(self, row: int, column: int) -> int:
        """Returns the difference of a pair's column and row, less that of a thread's first column and row."""
        return column - ROW_DISTANCE * row

    def _value(self, n: int, operands: list[Any], row: int, column: int, product: Any) -> Any:
        node = self._program.nodes[n]
        if node.operation == "score":
            return arith.mulf(product, float32_constant(self._unit()))
        if node.operation in self._uniform:
            return self._uniform[node.operation]
        if node.operation == self._row_name:
            return self._rows[row]
        if node.operation == self._column_name:
            return arith.addi(self._first_column, int32_constant(column))
        if node.operation == "constant":
            return scalar_operations.constant(node)
        if node.operation == "load":
            array: Any = self._arrays[node.value]
            return scalar_operations.load_element(node, array, operands or [int32_constant(0)])
        return self._operation(n, operands, row, column)

    def _operation(self, n: int, operands: list[Any], row: int, column: int) -> Any:
        node = self._program.nodes[n]
        if n in self._differences:
            return self._difference(n, self._diagonal(row, column), "int32")
        operand_dtype = self._program.nodes[node.operands[0]].dtype
        if node.operation == "div" and operand_dtype == "float32" and "score" in self._program.reads[n]:
            return self._divide(node.operands[1], operands)
        if (converted := self._converted_difference(n, self._diagonal(row, column))) is not None:
            return converted
        return scalar_operations.compute(node, operand_dtype, operands)

    def _converted_difference(self, n: int, diagonal: int) -> Any:
        """Returns the value of a node that converts a difference of indices, or its absolute value, to float32; None
        for another node.
        """
        node, nodes = self._program.nodes[n], self._program.nodes
        if node.operation != "convert_element_type" or node.dtype != "float32" or not self.options.has_exact_indices:
            return None
        (source,) = node.operands
        if nodes[source].operation == "abs" and nodes[source].operands[0] in self._differences:
            return math_dialect.absf(self._difference(nodes[source].operands[0], diagonal, "float32"))
        return self._difference(source, diagonal, "float32") if source in self._differences else None

    def _difference(self, n: int, diagonal: int, dtype: str) -> Any:
        """Returns a difference of query and key: that of a thread's first pair, which is computed once, and a constant.

        In float32 it is exact, and saves converting an integer for every pair.
        """
        key_is_first = self._differences[n]
        column_is_first = key_is_first == (self._column_name == "k_idx")
        key = n, "first", dtype
        if key not in self._known:
            pair = (self._first_column, self._rows[0])
            first = arith.subi(*(pair if column_is_first else pair[::-1]))
            self._known[key] = arith.sitofp(ir.F32Type.get(), first) if dtype == "float32" else first
        offset = diagonal if column_is_first else -diagonal
        if dtype == "float32":
            return arith.addf(self._known[key], float32_constant(float(offset)))
        return arith.addi(self._known[key], int32_constant(offset))

    def _divide(self, divisor: int, operands: list[Any]) -> Any:
        """Divides a score; by a constant it multiplies, which takes a tenth of the instructions."""
        node = self._program.nodes[divisor]
        if node.operation == "constant" and node.value:
            value: Any = node.value
            return arith.mulf(operands[0], float32_constant(1.0 / value))
        return arith.divf(*operands)
