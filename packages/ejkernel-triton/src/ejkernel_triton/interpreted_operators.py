"""Operators of tensors in Triton's interpreter, without its checks where operands have types that it has checked.

For each operator, the interpreter converts the operands to a common type and shape, and builds tensors for what it has
converted. This takes ten times longer than the sum or product of small arrays. What it does depends on the operands'
types alone, and on the value of a Python number. So the first operation of two types is the interpreter's, and NumPy
computes the same from the operands' arrays. If the two agree bit by bit, NumPy alone computes later ones.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Function = Callable[[Any, Any], Any]

ARITHMETIC: Mapping[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "mod": np.fmod,
}
COMPARISONS: Mapping[str, Function] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
OF_BITS: Mapping[str, Function] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}

NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64")
"""The element types that the interpreter holds in arrays of the same type."""

MARK = "is_from_ejkernel"
"""An attribute of the operators that `install` makes."""

MOST_KNOWN = 4096
"""The pairs of types, and of a type and a number, that are kept for an operator."""


class _Known:
    """How to make the result of an operator on operands of known types.

    Args:
        function: Computes its array from those of the operands.
        result: A result of the interpreter, for its types.
        number: The array of the second operand, if that is a number.
    """

    def __init__(self, function: Function, result: Any, number: Any = None) -> None:
        self.function, self.number = function, number
        self.tensor_class, self.handle_class = type(result), type(result.handle)
        self.fields = {name: x for name, x in vars(result).items() if name != "handle"}
        self.handle_dtype, self.dtype = result.handle.dtype, result.handle.data.dtype

    def tensor(self, data: Any) -> Any:
        """Returns a tensor of the known type."""
        handle = object.__new__(self.handle_class)
        handle.data, handle.dtype, handle.attr = data, self.handle_dtype, {}
        tensor = object.__new__(self.tensor_class)
        vars(tensor).update(self.fields, handle=handle)
        return tensor


def install(tensor_class: Any, constexpr: Any, set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Replaces the operators of the interpreter's tensors.

    Args:
        tensor_class: The class, whose operators are those of the interpreter.
        constexpr: The class of compile-time constants.
        set_attribute: Called with the class, a name and a function.
    """
    if hasattr(tensor_class.__add__, MARK):
        return  # the interpreter prepares the class twice for modules that know it by two names
    for name, function in {**ARITHMETIC, **COMPARISONS, **OF_BITS}.items():
        set_attribute(tensor_class, f"__{name}__", _faster(tensor_class, constexpr, name, function))
        if name in ARITHMETIC:
            reflected = _reflected(function)
            set_attribute(tensor_class, f"__r{name}__", _faster(tensor_class, constexpr, f"r{name}", reflected))


def _reflected(function: Function) -> Function:
    return lambda lhs, rhs: function(rhs, lhs)


_known: dict[str, dict[Any, _Known | None]] = {}
"""By operator and the types of its operands; None where the interpreter computes something else."""


def _faster(tensor_class: Any, constexpr: Any, name: str, function: Function) -> Function:
    """Returns an operator."""
    slow = getattr(tensor_class, f"__{name}__")
    known = _known.setdefault(name, {})

    def apply(lhs: Any, rhs: Any) -> Any:
        handle, operand = lhs.handle, rhs
        if isinstance(rhs, tensor_class):
            other = rhs.handle
            key = (lhs.type.name, handle.dtype.name, rhs.type.name, other.dtype.name)
            found = known.get(key)
            if found is not None:
                data = found.function(handle.data, other.data)
                if data.dtype == found.dtype:
                    return found.tensor(data)
        else:
            operand = rhs.value if isinstance(rhs, constexpr) else rhs
            if type(operand) not in (int, float) or operand != operand:
                return slow(lhs, rhs)
            key = (lhs.type.name, handle.dtype.name, type(operand), operand)
            found = known.get(key)
            if found is not None:
                return found.tensor(found.function(handle.data, found.number))
        result = slow(lhs, rhs)
        if key not in known and len(known) < MOST_KNOWN:
            known[key] = _learn(name, function, lhs, operand, result)
        return result

    setattr(apply, MARK, True)
    return apply


def _learn(name: str, function: Function, lhs: Any, rhs: Any, result: Any) -> _Known | None:
    """Returns how to compute what the interpreter did, or None where NumPy does something else."""
    data, element = lhs.handle.data, lhs.dtype.name
    number = None
    if isinstance(rhs, int | float):
        if element not in NUMBERS or not rhs:  # the two zeros are equal as keys
            return None
        with np.errstate(all="ignore"):
            number = np.asarray([rhs]).astype(data.dtype)
        other = number
    else:
        other = rhs.handle.data
        if lhs.dtype.is_ptr():
            if name != "add" or rhs.dtype.name not in ("int32", "int64"):
                return None
            function = _moved_by(max(1, lhs.dtype.element_ty.primitive_bitwidth // 8))
        elif element != rhs.dtype.name or not (element in NUMBERS or (element == "int1" and name in OF_BITS)):
            return None
    try:
        same = function(data, other)
    except TypeError:  # no such operation on these types
        return None
    wanted = result.handle.data
    if (same.dtype, same.shape, same.tobytes()) != (wanted.dtype, wanted.shape, wanted.tobytes()):
        return None
    return _Known(function, result, number)


def _moved_by(num_bytes: int) -> Function:
    """Returns the function that moves pointers by a number of elements."""
    return lambda pointer, offset: operator.add(pointer, num_bytes * offset.astype(np.uint64))
