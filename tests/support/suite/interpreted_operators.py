"""Operators of tensors in Triton's interpreter, without its checks where operands have types that it has checked.

For each operator, the interpreter converts the operands to a common type and shape, and builds tensors for what it has
converted. This takes ten times longer than the sum or product of small arrays. What it does depends on the operands'
types alone, and on the value of a Python number. So the first operation of two types is the interpreter's, and NumPy
computes the same from the operands' arrays. If the two agree bit by bit, NumPy alone computes later ones.

Results are the interpreter's, so this is for tests alone: `suite/servers.py` installs it where kernels are interpreted.
"""

import importlib
import inspect
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
"""The attribute that marks operators installed by this module."""

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


def install() -> None:
    """Prepares the interpreter of this process for the Triton kernels; does nothing when called again."""
    compat: Any = importlib.import_module("ejkernel_triton._compat")
    patch = compat.patch_interpreter
    if patch.__module__ == __name__:
        return

    def patch_interpreter() -> None:
        patch()
        _make_faster(compat._interpreter_module())

    compat.patch_interpreter = patch_interpreter


def _make_faster(interpreter: Any) -> None:
    core, patch_tensor = interpreter.tl.core, interpreter._patch_lang_tensor
    if hasattr(patch_tensor, MARK):
        return

    def patch_tensor_and_operators(tensor_class: Any, patch_scope: Any) -> None:
        patch_tensor(tensor_class, patch_scope)
        if not interpreter.interpreter_builder.options.sanitize_overflow:  # which looks at every sum and product
            _replace_operators(tensor_class, core.constexpr, patch_scope.set_attr)

    vars(patch_tensor_and_operators).update(vars(patch_tensor), **{MARK: True})
    interpreter._patch_lang_tensor = patch_tensor_and_operators
    interpreter._patch_builtin = _builtin_patcher(interpreter)
    _share_types_of_scalars(core.tensor)
    _unwrap_plain_values_at_once(core)


def _builtin_patcher(interpreter: Any) -> Callable[[Any, Any, Any], None]:
    """Returns a function that gives the functions of a module to the interpreter, with one call less in each of them,
    and that looks for them once per module.
    """
    semantic, is_builtin = interpreter.interpreter_semantic, interpreter.tl.core.is_builtin
    found: dict[Any, list[tuple[str, Any]]] = {}

    def give_semantic(member: Any) -> Any:
        # Triton's decorator checks that the argument is there, and calls the function that it wraps.
        function = getattr(member, "__wrapped__", member)

        def call_with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call_with_semantic

    def patch_builtins(package: Any, builder: Any, patch_scope: Any) -> None:
        if package not in found:
            members = inspect.getmembers(package)
            found[package] = [(name, give_semantic(member)) for name, member in members if is_builtin(member)]
        for name, function in found[package]:
            patch_scope.set_attr(package, name, function)

    return patch_builtins


def _share_types_of_scalars(tensor_class: Any) -> None:
    """Lets scalars share what `ejkernel_triton._compat` shares among blocks."""
    init_from_cache = tensor_class.__init__

    def init_tensor(tensor: Any, handle: Any, tensor_type: Any) -> None:
        if not hasattr(tensor_type, "_tensor_fields") and not tensor_type.is_block():
            tensor_type._tensor_fields = {}
        init_from_cache(tensor, handle, tensor_type)

    tensor_class.__init__ = init_tensor


def _unwrap_plain_values_at_once(core: Any) -> None:
    """Asks for the type of a value once, not for each kind of value that may hold constants of the compiler."""
    unwrap, plain = core._unwrap_if_constexpr, {int, float, bool, str, type(None), core.tensor}

    def unwrap_if_constexpr(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _replace_operators(tensor_class: Any, constexpr: Any, set_attribute: Callable[[Any, str, Any], None]) -> None:
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
