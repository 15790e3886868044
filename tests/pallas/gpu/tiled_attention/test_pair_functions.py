"""The operations that functions of pairs become in a thread of the Hopper kernels, evaluated with NumPy."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning.scalar_programs import scalar_program
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel_pallas.gpu.tiled_attention.kernels.pair_functions import PairValues, ValueOptions
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

FIRST_ROW, FIRST_COLUMN, UNIT = 1000, 960, 0.3
PAIRS = tuple(itertools.product((0, 1), [8 * group + n for group in range(16) for n in (0, 1)]))
"""Rows, of a thread's two, and columns, from its first one, of its pairs in a tile of 128 columns."""
OPERATIONS = {
    "arith.addf": np.add,
    "arith.addi": np.add,
    "arith.maxsi": np.maximum,
    "arith.mulf": np.multiply,
    "arith.muli": np.multiply,
    "arith.negf": np.negative,
    "arith.sitofp": np.float32,
    "arith.subf": np.subtract,
    "arith.subi": np.subtract,
    "math.absf": np.abs,
    "math.fma": lambda x, y, z: np.float32(np.float64(x) * np.float64(y) + np.float64(z)),
}
COMPARISONS = {2: np.less, 3: np.less_equal, 4: np.greater, 5: np.greater_equal}


def evaluate(traced, rows_are_queries, has_exact_indices=True, products=None, result_unit=1.0):
    """The results for `PAIRS`, and how often a thread computes each operation."""
    program, (i32, f32) = scalar_program(traced), (ir.IntegerType.get_signless(32), ir.F32Type.get())
    inputs = dict(zip(("b", "h"), (1, 3), strict=True))
    numbers = [*inputs.values(), FIRST_ROW, FIRST_ROW + 8, FIRST_COLUMN]
    types = [i32] * len(numbers) + [f32] * len(PAIRS)
    function = func.FuncOp("run", (types, []))
    block = function.add_entry_block()
    batch_row, head, *rows, column = block.arguments[: len(numbers)]
    unit = None if products is None else UNIT
    with ir.InsertionPoint(block):
        uniform = {"b": batch_row, "h": head}
        options = ValueOptions(rows_are_queries, has_exact_indices, unit, result_unit)
        values = PairValues(program, (), uniform, rows, column, options)
        results = [
            values.compute(program.result, *pair, product)
            for pair, product in zip(PAIRS, block.arguments[len(numbers) :], strict=True)
        ]
    products = np.zeros(len(PAIRS), np.float32) if products is None else products
    known = dict(zip(block.arguments, (*map(np.int32, numbers), *products), strict=True))
    counts = collections.Counter()
    for operation in block.operations:
        known[operation.results[0]] = _result(operation, [known[x] for x in operation.operands])
        counts[operation.operation.name] += 1
    return np.array([known[x] for x in results]), counts


def _result(operation, operands):
    if operation.operation.name == "arith.constant":
        value = operation.attributes["value"].value
        return np.float32(value) if operation.attributes["value"].type == ir.F32Type.get() else np.int32(value)
    if operation.operation.name == "arith.cmpi":
        return COMPARISONS[operation.attributes["predicate"].value](*operands)
    return OPERATIONS[operation.operation.name](*operands)


def indices(rows_are_queries):
    """The queries and keys of `PAIRS`."""
    row, column = np.array(PAIRS, np.int32).T
    row, column = FIRST_ROW + 8 * row, FIRST_COLUMN + column
    return (row, column) if rows_are_queries else (column, row)


@pytest.fixture(autouse=True)
def module():
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield


FUNCTIONS = {
    "relative": lambda score, b, h, q, k: score + (q - k),
    "slopes": lambda score, b, h, q, k: score + (k - q) * (0.1 * (h + 1)),
    "distance": lambda score, b, h, q, k: score - 0.37 * jnp.abs(q - k),
    "minus score": lambda score, b, h, q, k: (q - k) - score,
    "scaled": lambda score, b, h, q, k: 2.5 * score + 0.1 * (k - q),
    "one index": lambda score, b, h, q, k: score + 0.1 * q,
    "bounded": lambda score, b, h, q, k: score + jnp.maximum(k - q, -50) * 0.1,
}


@pytest.mark.parametrize("has_exact_indices", [True, False])
@pytest.mark.parametrize("rows_are_queries", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_match_the_function(name, rows_are_queries, has_exact_indices):
    traced = score_function("score_mod", FUNCTIONS[name], jnp.float32)
    products = np.random.RandomState(0).randn(len(PAIRS)).astype(np.float32)
    found, _ = evaluate(traced, rows_are_queries, has_exact_indices, products)
    query, key = indices(rows_are_queries)
    expected = jax.vmap(FUNCTIONS[name], (0, None, None, 0, 0))(products * np.float32(UNIT), 1, 3, query, key)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows_are_queries", [True, False])
@pytest.mark.parametrize("name", ["slopes", "distance"])
def test_scaled_differences_are_added_in_the_unit_of_products(name, rows_are_queries):
    traced = score_function("score_mod", FUNCTIONS[name], jnp.float32)
    products = np.random.RandomState(0).randn(len(PAIRS)).astype(np.float32)
    found, _ = evaluate(traced, rows_are_queries, True, products, result_unit=UNIT)
    query, key = indices(rows_are_queries)
    expected = jax.vmap(FUNCTIONS[name], (0, None, None, 0, 0))(products * np.float32(UNIT), 1, 3, query, key)
    np.testing.assert_allclose(found * np.float32(UNIT), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "is_scaled"), [("slopes", True), ("relative", False), ("scaled", False)])
@pytest.mark.parametrize("scale", [0.125, 0.1])
def test_only_powers_of_two_are_units_of_modified_scores(name, is_scaled, scale):
    array = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    function = score_function("score_mod", FUNCTIONS[name], jnp.float32)
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=scale, score_mod=function)
    unit = make_spec(record).modified_score_unit
    assert unit == (scale if is_scaled and scale == 0.125 else 1)
    assert make_spec(record).softmax_scale_log2 == unit * LOG2E


@pytest.mark.parametrize("rows_are_queries", [True, False])
def test_masks_match_the_function(rows_are_queries):
    def mask(b, h, q, k):
        return q - k < 10 * h

    found, counts = evaluate(mask_function("mask_mod", mask), rows_are_queries)
    query, key = indices(rows_are_queries)
    np.testing.assert_array_equal(found, mask(1, 3, query, key))
    assert counts["arith.cmpi"] == len(PAIRS)


@pytest.mark.parametrize(("name", "products_of_diagonals"), [("relative", 0), ("slopes", 34), ("distance", 34)])
def test_a_diagonal_is_computed_once_and_one_integer_is_converted(name, products_of_diagonals):
    traced = score_function("score_mod", FUNCTIONS[name], jnp.float32)
    _, counts = evaluate(traced, True, products=np.ones(len(PAIRS), np.float32))
    conversions_of_heads = name == "slopes"
    assert counts["arith.sitofp"] == 1 + conversions_of_heads
    assert counts["arith.addf"] == 34
    assert counts["math.fma"] == len(PAIRS)
    unused_scores = len(PAIRS)  # LLVM removes them
    assert counts["arith.mulf"] == unused_scores + products_of_diagonals + conversions_of_heads


def test_indices_without_a_bound_are_converted_as_integers():
    traced = score_function("score_mod", FUNCTIONS["relative"], jnp.float32)
    _, counts = evaluate(traced, True, has_exact_indices=False, products=np.ones(len(PAIRS), np.float32))
    assert counts["arith.sitofp"] == 34
    assert not counts["arith.addf"]
