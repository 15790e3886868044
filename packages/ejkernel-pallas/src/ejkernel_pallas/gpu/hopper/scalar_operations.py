"""The operations of a `ScalarProgram` on the values of a thread, for code below Pallas."""

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref

from ejkernel.arithmetic import LN2, LOG2E
from ejkernel.planning.scalar_programs import ScalarNode
from ejkernel_pallas.gpu.hopper.powers_of_two import exp2_instruction
from ejkernel_pallas.gpu.hopper.registers import float32_constant, int32_constant, int32_type

FLOAT_PREDICATES = {"eq": "OEQ", "ge": "OGE", "gt": "OGT", "le": "OLE", "lt": "OLT", "ne": "UNE"}
INT_PREDICATES = {"eq": "eq", "ge": "sge", "gt": "sgt", "le": "sle", "lt": "slt", "ne": "ne"}
SIMPLE_OPERATIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("abs", "float32"): math.absf,
    ("add", "float32"): arith.addf,
    ("add", "int32"): arith.addi,
    ("div", "float32"): arith.divf,
    ("div", "int32"): arith.divsi,
    ("max", "float32"): arith.maximumf,
    ("max", "int32"): arith.maxsi,
    ("max", "bool"): arith.ori,
    ("min", "float32"): arith.minimumf,
    ("min", "int32"): arith.minsi,
    ("min", "bool"): arith.andi,
    ("mul", "float32"): arith.mulf,
    ("mul", "int32"): arith.muli,
    ("mul", "bool"): arith.andi,
    ("neg", "float32"): arith.negf,
    ("rem", "int32"): arith.remsi,
    ("sub", "float32"): arith.subf,
    ("sub", "int32"): arith.subi,
}
"""Operations that are one of MLIR's, by their name and the dtype of their operands."""


def constant(node: ScalarNode) -> Any:
    """Returns the value of a constant."""
    value: Any = node.value
    if node.dtype == "float32":
        return float32_constant(float(value))
    return int32_constant(int(value)) if node.dtype == "int32" else _bool_constant(bool(value))


def load_element(node: ScalarNode, array: Any, indices: list[Any]) -> Any:
    """Returns an element of an array in device memory; arrays of bool are int32."""
    element = memref.load(array, [arith.index_cast(ir.IndexType.get(), x) for x in indices])
    if node.dtype == "bool":
        return arith.cmpi(arith.CmpIPredicate.ne, element, int32_constant(0))
    return _widen(element) if node.dtype == "float32" else element


def compute(node: ScalarNode, operand_dtype: str, operands: list[Any]) -> Any:
    """Returns the result of an operation.

    Args:
        node: The operation.
        operand_dtype: The dtype of its first operand.
        operands: The values of its operands.
    """
    name = node.operation
    if (simple := SIMPLE_OPERATIONS.get((name, operand_dtype))) is not None:
        return simple(*operands)
    if name in INT_PREDICATES:
        return _compare(name, operand_dtype, *operands)
    functions: dict[str, Callable[..., Any]] = {
        "abs": lambda x: arith.maxsi(x, arith.subi(int32_constant(0), x)),
        "and": arith.andi,
        "clamp": lambda low, x, high: _clamp(operand_dtype, low, x, high),
        "convert_element_type": lambda x: _convert(x, operand_dtype, node.dtype),
        "integer_pow": lambda x: _integer_power(x, operand_dtype, node.value),
        "exp": lambda x: exp2_instruction(arith.mulf(x, float32_constant(LOG2E))),
        "exp2": exp2_instruction,
        "log": lambda x: arith.mulf(_instruction("lg2", x), float32_constant(LN2)),
        "log1p": lambda x: arith.mulf(_instruction("lg2", arith.addf(x, float32_constant(1.0))), float32_constant(LN2)),
        "logistic": _logistic,
        "pow": _power,
        "rsqrt": lambda x: _instruction("rsqrt", x),
        "sqrt": lambda x: _instruction("sqrt", x),
        "tanh": lambda x: _instruction("tanh", x),
        "neg": lambda x: arith.subi(int32_constant(0), x),
        "not": lambda x: arith.xori(x, _bool_constant(True) if operand_dtype == "bool" else int32_constant(-1)),
        "or": arith.ori,
        "select_n": lambda condition, x, y: arith.select(condition, y, x),
        "shift_left": lambda x, bits: _shift(arith.shli, x, bits),
        "shift_right_arithmetic": lambda x, bits: arith.shrsi(x, arith.minui(bits, int32_constant(31))),
        "shift_right_logical": lambda x, bits: _shift(arith.shrui, x, bits),
        "sign": lambda x: _sign(x, operand_dtype),
        "xor": arith.xori,
    }
    return functions[name](*operands)


def _bool_constant(value: bool) -> Any:
    bool_type = ir.IntegerType.get_signless(1)
    return arith.constant(bool_type, ir.IntegerAttr.get(bool_type, int(value)))


def _widen(element: Any) -> Any:
    """Returns a number in float32."""
    f32 = ir.F32Type.get()
    return element if element.type == f32 else arith.extf(f32, element)


def _compare(name: str, dtype: str, x: Any, y: Any) -> Any:
    if dtype == "float32":
        return arith.cmpf(getattr(arith.CmpFPredicate, FLOAT_PREDICATES[name]), x, y)
    # In a signed comparison True, which is one bit, is -1.
    predicate = INT_PREDICATES[name].replace("s", "u") if dtype == "bool" else INT_PREDICATES[name]
    return arith.cmpi(getattr(arith.CmpIPredicate, predicate), x, y)


def _instruction(name: str, x: Any) -> Any:
    """Returns a function of the special-function unit."""
    return llvm.inline_asm(x.type, [x], f"{name}.approx.f32 $0, $1;", "=f,f", has_side_effects=False)


def _power(x: Any, y: Any) -> Any:
    """Returns `x` to the power of `y`, float32; NaN if `x` is negative and `y` is no integer."""
    zero, one = float32_constant(0.0), float32_constant(1.0)
    magnitude = exp2_instruction(arith.mulf(y, _instruction("lg2", math.absf(x))))
    magnitude = arith.select(_compare("eq", "float32", y, zero), one, magnitude)
    whole = _convert(_convert(y, "float32", "int32"), "int32", "float32")
    is_odd = arith.trunci(ir.IntegerType.get_signless(1), _convert(y, "float32", "int32"))
    of_negative = arith.select(is_odd, arith.negf(magnitude), magnitude)
    of_negative = arith.select(_compare("eq", "float32", whole, y), of_negative, float32_constant(float("nan")))
    return arith.select(_compare("lt", "float32", x, zero), of_negative, magnitude)


def _clamp(dtype: str, low: Any, x: Any, high: Any) -> Any:
    return SIMPLE_OPERATIONS["min", dtype](SIMPLE_OPERATIONS["max", dtype](x, low), high)


def _convert(x: Any, source: str, target: str) -> Any:
    if target == "float32":
        if source == "int32":
            return arith.sitofp(ir.F32Type.get(), x)
        return arith.uitofp(ir.F32Type.get(), x) if source == "bool" else _widen(x)
    if target == "int32":
        if source == "bool":
            return arith.extui(int32_type(), x)
        # As XLA converts: numbers out of range are clamped.
        return llvm.inline_asm(int32_type(), [_widen(x)], "cvt.rzi.s32.f32 $0, $1;", "=r,f")
    zero = int32_constant(0) if source == "int32" else float32_constant(0.0)
    return _compare("ne", "int32" if source == "int32" else "float32", x if source == "int32" else _widen(x), zero)


def _integer_power(x: Any, dtype: str, exponent: Any) -> Any:
    """Returns `x` to a constant power, by squaring."""
    multiply, one = (arith.muli, int32_constant(1)) if dtype == "int32" else (arith.mulf, float32_constant(1.0))
    result, square, left = None, x, abs(exponent)
    while left:
        if left & 1:
            result = square if result is None else multiply(result, square)
        left >>= 1
        square = multiply(square, square) if left else square
    result = one if result is None else result
    return SIMPLE_OPERATIONS["div", dtype](one, result) if exponent < 0 else result


def _logistic(x: Any) -> Any:
    one = float32_constant(1.0)
    exponential = exp2_instruction(arith.mulf(x, float32_constant(-LOG2E)))
    return arith.divf(one, arith.addf(one, exponential))


def _shift(shift: Callable[[Any, Any], Any], x: Any, bits: Any) -> Any:
    """Returns a shifted word; 0 if all of its bits are shifted out."""
    is_partial = arith.cmpi(arith.CmpIPredicate.ult, bits, int32_constant(32))
    return arith.select(is_partial, shift(x, arith.minui(bits, int32_constant(31))), int32_constant(0))


def _sign(x: Any, dtype: str) -> Any:
    if dtype == "int32":
        return arith.maxsi(arith.minsi(x, int32_constant(1)), int32_constant(-1))
    zero, one = float32_constant(0.0), float32_constant(1.0)
    negative = arith.select(_compare("lt", dtype, x, zero), arith.negf(one), x)
    return arith.select(_compare("gt", dtype, x, zero), one, negative)
