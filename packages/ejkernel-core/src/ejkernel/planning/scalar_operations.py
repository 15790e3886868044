"""The operations on scalars that `scalar_programs` translates functions into."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

ARITHMETIC = "abs add clamp convert_element_type div integer_pow max min mul neg rem sign square sub"
FUNCTIONS = "exp exp2 log log1p logistic pow rsqrt sqrt tanh"
LOGIC = "and eq ge gt le lt ne not or select_n shift_left shift_right_arithmetic shift_right_logical xor"
OPERATIONS = frozenset(f"{ARITHMETIC} {FUNCTIONS} {LOGIC}".split())
"""Operations on scalars that kernels compute."""
DTYPES = ("float32", "int32", "bool")
"""The dtypes of the values that kernels compute with."""
LOADED_DTYPES = ("float32", "bfloat16", "float16", "int32", "bool")
"""The dtypes of the arrays whose elements kernels load."""


@dataclasses.dataclass(frozen=True)
class ScalarNode:
    """One operation of a program.

    Attributes:
        operation: A name of `INPUTS` or `OPERATIONS`, `"constant"`, or `"load"`, an element of an array.
        operands: The indices of the nodes that it reads; of a load the indices along the array's axes.
        dtype: The dtype of its result.
        value: The number of a constant, the index of the array of a load, or the exponent of an `integer_pow`.
    """

    operation: str
    operands: tuple[int, ...]
    dtype: str
    value: Any = None


ZERO = ScalarNode("constant", (), "int32", 0)


def compute_node(node: ScalarNode, operands: list[Any]) -> Any:
    """Returns the result of an operation of arrays of one shape, element by element."""
    if node.operation == "convert_element_type":
        return operands[0].astype(node.dtype)
    if node.operation == "integer_pow":
        return operands[0] ** node.value
    functions = {name: getattr(jnp, f"bitwise_{name}") for name in ("and", "or", "not", "xor")}
    function = functions[node.operation] if node.operation in functions else getattr(jax.lax, node.operation)
    return function(*operands)


def unknown_dtype(name: str, dtypes: list[str]) -> str | None:
    """Returns the dtype, of the result and the operands of an operation, for which kernels do not have it."""
    result, *operands = dtypes
    if name == "convert_element_type":
        known = result in DTYPES and operands[0] in LOADED_DTYPES
        return None if known else f"{operands[0]} to {result}"
    of_one_kind = {"rem": "int32", "select_n": "bool"}
    if name in of_one_kind and operands[0] != of_one_kind[name]:
        return operands[0]
    return next((kind for kind in dtypes if kind not in DTYPES), None)


def simplified(name: str, nodes: list[ScalarNode], operands: list[int]) -> int | None:
    """Returns the operand that an operation leaves as it is, or None."""
    if name == "mul":
        for n in (0, 1):
            if nodes[n].operation == "constant" and nodes[n].value == 1:
                return operands[1 - n]
    if name == "select_n" and nodes[0].operation == "constant":
        return operands[1 + int(nodes[0].value)]
    return None
