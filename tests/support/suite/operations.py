"""Single operations outside of `jax.jit`, which NumPy computes.

JAX compiles a program for each operation on each shape: 10 to 20 ms for what runs in microseconds. Two thirds of the
programs of the tests of core were such operations. Here NumPy computes those whose result is JAX's bit by bit: they
move elements, compare them, compute with integers, or round once. All others are left to JAX, and so is everything that
has a name of its own, is traced, sharded, committed to a device or donated.

The library that is tested gets these, too, where it runs outside of `jax.jit`.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array, core, named_sharding, pjit

from suite.arrays import MAX_NUMPY_ELEMENTS, to_donatable_jax_array

MOST_USES = 64
"""Calls of an operation after which JAX compiles it, since a compiled one is faster."""

MOST_OPERATIONS = 8
"""The most operations of a `jax.numpy` function that NumPy computes."""

FUNCTION = "_pjit_call_impl_python"
NUMBERS = ("float32", "int32", "int16", "int8", "uint32", "uint16", "uint8", "bool", "int64", "float64", "uint64")
HALVES = ("bfloat16", "float16")

Operation = Callable[..., Any]


class LeftToJaxError(Exception):
    """NumPy might compute something else."""


def install() -> None:
    """Replaces the function of JAX that compiles and calls; does nothing where JAX has none of that name."""
    call = getattr(pjit, FUNCTION, None)
    if call is not None and call.__module__ != __name__:
        setattr(pjit, FUNCTION, _computed_by_numpy(call))


def _computed_by_numpy(call: Operation) -> Operation:
    """Returns the function, which asks NumPy first."""

    def call_or_compute(*args: Any, **params: Any) -> Any:
        steps = _steps_of(params)
        if steps is not None and all(map(_is_plain, args)):
            try:
                outputs = steps.run(args)
            except LeftToJaxError:
                pass
            else:
                return outputs, None, None, []
        return call(*args, **params)

    return call_or_compute


def _is_plain(value: Any) -> bool:
    """Returns whether a value is on the default device, and is not needed elsewhere."""
    if isinstance(value, jax.Array):
        return not value.committed and not value.is_deleted() and value.size <= MAX_NUMPY_ELEMENTS
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


class _Steps:
    """The operations of a function of `jax.numpy`, as NumPy computes them.

    Args:
        closed: The function.

    Raises:
        LeftToJaxError: One of them is not NumPy's.
    """

    def __init__(self, closed: Any) -> None:
        self.jaxpr, self.constants, self.uses = closed.jaxpr, closed.consts, 0
        avals = [*closed.in_avals, *closed.out_avals]
        if len(self.jaxpr.eqns) > MOST_OPERATIONS or any(_name_of_dtype(x) not in (*NUMBERS, *HALVES) for x in avals):
            raise LeftToJaxError
        if sum(_rounds(eqn) for eqn in self.jaxpr.eqns) > 1:  # XLA might round once for two of them
            raise LeftToJaxError
        if any(eqn.primitive.name == "div" and not _has_equal_shapes(eqn) for eqn in self.jaxpr.eqns):
            raise LeftToJaxError  # XLA multiplies by the inverse of what it knows to be one number
        self.operations = [_operation_of(eqn) for eqn in self.jaxpr.eqns]

    def run(self, args: Sequence[Any]) -> list[jax.Array]:
        """Returns the results."""
        self.uses += 1
        given = [np.asarray(x).astype(v.aval.dtype) for v, x in zip(self.jaxpr.invars, args, strict=True)]
        with np.errstate(all="ignore"):
            found = self.compute(given)
        outputs = [np.asarray(x) for x in found]
        for variable, x in zip(self.jaxpr.outvars, outputs, strict=True):
            if (x.shape, x.dtype) != (variable.aval.shape, variable.aval.dtype) or x.size > MAX_NUMPY_ELEMENTS:
                raise LeftToJaxError
        return [
            _with_weak_type(to_donatable_jax_array(x), v.aval) for v, x in zip(self.jaxpr.outvars, outputs, strict=True)
        ]

    def compute(self, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the results of arrays of the right dtypes."""
        known: dict[Any, Any] = dict(zip(self.jaxpr.invars, args, strict=True))
        known.update(zip(self.jaxpr.constvars, map(np.asarray, self.constants), strict=True))

        def value(variable: Any) -> Any:
            if isinstance(variable, core.Literal):
                literal: Any = variable
                return np.asarray(literal.val, literal.aval.dtype)
            return known[variable]

        for eqn, operation in zip(self.jaxpr.eqns, self.operations, strict=True):
            results = operation(*map(value, eqn.invars))
            known.update(zip(eqn.outvars, results if isinstance(results, list) else [results], strict=True))
        return [value(variable) for variable in self.jaxpr.outvars]


_config: Any = jax.config
_all_steps: weakref.WeakKeyDictionary[Any, _Steps | None] = weakref.WeakKeyDictionary()


def _steps_of(params: dict[str, Any]) -> _Steps | None:
    """Returns the steps of a call; None where it is JAX's."""
    closed = params["jaxpr"]
    if closed not in _all_steps:
        try:
            _all_steps[closed] = _Steps(closed) if _may_be_computed(params) else None
        except LeftToJaxError:
            _all_steps[closed] = None
    steps, config = _all_steps[closed], _config
    if steps is None or steps.uses >= MOST_USES or config.jax_default_device is not None:
        return None
    is_usual = jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
    return None if config.jax_debug_nans or config.jax_debug_infs or not is_usual else steps


def _may_be_computed(params: dict[str, Any]) -> bool:
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        params["name"].lstrip("_") in NAMES
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and all(isinstance(x, named_sharding.UnspecifiedValue) for x in shardings)
        and not any(x is not None for x in layouts)
        and not params["jaxpr"].effects
    )


def _with_weak_type(x: Any, aval: Any) -> jax.Array:
    return array.ArrayImpl(aval, x.sharding, [x], committed=False) if aval.weak_type else x


def _name_of_dtype(aval: Any) -> str:
    return np.dtype(aval.dtype).name if not jnp.issubdtype(aval.dtype, jax.dtypes.extended) else ""


# --- what NumPy computes ---------------------------------------------------------------------------------------------


def _has_equal_shapes(eqn: Any) -> bool:
    return len({v.aval.shape for v in eqn.invars}) == 1


def _rounds(eqn: Any) -> bool:
    """Returns whether an operation rounds."""
    return eqn.primitive.name in ROUNDED and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)


def _operation_of(eqn: Any) -> Operation:
    """Returns what computes the results of an operation from its operands.

    Raises:
        LeftToJaxError: NumPy has no such operation.
    """
    name, params = eqn.primitive.name, eqn.params
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    dtypes = [_name_of_dtype(aval) for aval in avals]
    if any(dtype not in (*NUMBERS, *HALVES) for dtype in dtypes):
        raise LeftToJaxError
    if name in ("jit", "pjit"):
        inner = _Steps(params["jaxpr"])
        return _left() if any(map(_rounds, inner.jaxpr.eqns)) else lambda *given: inner.compute(given)
    if name in ROUNDED:
        return _rounded(ROUNDED[name], dtypes)
    if name in EXACT:
        return EXACT[name]
    if name == "convert_element_type":
        return lambda x: _converted(x, np.dtype(params["new_dtype"]))
    if name in MOVES:
        return MOVES[name](params, avals)
    if name in REDUCTIONS and (name != "reduce_sum" or jnp.issubdtype(avals[0].dtype, jnp.integer)):
        return lambda x: _reduced(REDUCTIONS[name], x, params["axes"])
    return _left()


def _left() -> Operation:
    raise LeftToJaxError


def _rounded(function: Operation, dtypes: Sequence[str]) -> Operation:
    """Returns an operation whose results have no subnormal numbers, which XLA may round to 0."""
    if any(dtype in HALVES for dtype in dtypes):
        raise LeftToJaxError
    is_floating = dtypes[0].startswith("float")
    if not is_floating and function in (np.divide, np.sqrt):
        raise LeftToJaxError

    def compute(*operands: Any) -> Any:
        result = function(*operands)
        if is_floating:
            for x in (*operands, result):
                size = np.abs(x)
                if np.any((size > 0) & (size < np.finfo(x.dtype).tiny)):
                    raise LeftToJaxError
        return result

    return compute


def _converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns an array in another dtype."""
    source, target = x.dtype.name, dtype.name
    to_float, from_float = (np.dtype(d).name.startswith(("float", "bfloat")) for d in (dtype, x.dtype))
    if target == "bool":
        return x != 0
    if from_float and not to_float:
        if not np.all(np.abs(x.astype(np.float64)) < 100):  # NaN, too, and what the dtype might not hold
            raise LeftToJaxError
        if dtype.kind == "u" and np.any(x < 0):
            raise LeftToJaxError
        return np.trunc(x.astype(np.float64)).astype(dtype)
    if to_float and target in HALVES and source not in ("float32", *HALVES, "bool"):
        raise LeftToJaxError
    result = x.astype(dtype)
    if to_float and from_float:
        size = np.abs(result.astype(np.float64))
        if np.any((size > 0) & (size < float(jnp.finfo(dtype).tiny))) or np.any(np.isnan(size)):
            raise LeftToJaxError
    return result


def _reduced(function: Operation, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    if not x.size:
        raise LeftToJaxError
    return np.asarray(function(x, axis=tuple(axes))).astype(x.dtype)


def _broadcast(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    def compute(x: np.ndarray, *sizes: Any) -> np.ndarray:
        shape = [1] * len(params["shape"])
        for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
            shape[axis] = size
        return np.broadcast_to(x.reshape(shape), params["shape"])

    return compute if math.prod(params["shape"]) <= MAX_NUMPY_ELEMENTS else _left()


def _dynamic_slice(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    def compute(x: np.ndarray, *starts: Any) -> np.ndarray:
        bounds = zip(x.shape, starts, params["slice_sizes"], strict=True)
        begins = [min(max(int(start), 0), size - length) for size, start, length in bounds]
        return x[tuple(slice(b, b + n) for b, n in zip(begins, params["slice_sizes"], strict=True))]

    return compute


def _padded(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    widths = params["padding_config"]
    if any(low < 0 or high < 0 or interior for low, high, interior in widths):
        raise LeftToJaxError

    def compute(x: np.ndarray, value: Any) -> np.ndarray:
        result = np.full([n + low + high for n, (low, high, _) in zip(x.shape, widths, strict=True)], value, x.dtype)
        result[tuple(slice(low, low + n) for n, (low, _, _) in zip(x.shape, widths, strict=True))] = x
        return result

    return compute


def _sliced(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    strides = params["strides"] or (1,) * len(params["start_indices"])
    parts = tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
    return lambda x: x[parts]


def _iota(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    shape, axis = params["shape"], params["dimension"]
    if math.prod(shape) > MAX_NUMPY_ELEMENTS or np.dtype(params["dtype"]).name in HALVES:
        raise LeftToJaxError
    row = np.arange(shape[axis]).astype(params["dtype"])
    return lambda: np.broadcast_to(row.reshape([-1 if n == axis else 1 for n in range(len(shape))]), shape)


def _select(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    if np.dtype(avals[0].dtype) != np.bool_ or len(avals) != 4:
        raise LeftToJaxError
    return lambda which, no, yes: np.where(which, yes, no)


def _reshaped(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    return (lambda x: x.reshape(params["new_sizes"])) if params["dimensions"] is None else _left()


def _split(params: dict[str, Any], avals: Sequence[Any]) -> Operation:
    ends = np.cumsum(params["sizes"])[:-1]
    return lambda x: np.split(x, ends, params["axis"])


ROUNDED: dict[str, Operation] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "square": np.square,
}
"""What rounds numbers once, as IEEE 754 has it; of integers it is exact."""

EXACT: dict[str, Operation] = {
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "is_finite": lambda x: np.isfinite(x.astype(np.float64)),
    "copy": np.array,
    "copy_p": np.array,
}

MOVES: dict[str, Callable[[dict[str, Any], Sequence[Any]], Operation]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, avals: lambda *parts: np.concatenate(parts, params["dimension"]),
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "pad": _padded,
    "reshape": _reshaped,
    "rev": lambda params, avals: lambda x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "slice": _sliced,
    "split": _split,
    "squeeze": lambda params, avals: lambda x: np.squeeze(x, tuple(params["dimensions"])),
    "stack": lambda params, avals: lambda *parts: np.stack(parts, params["axis"]),
    "tile": lambda params, avals: lambda x: np.tile(x, params["reps"]),
    "transpose": lambda params, avals: lambda x: np.transpose(x, params["permutation"]),
}
"""What moves elements; a function of an operation's parameters, and of the shapes of its operands and results."""

REDUCTIONS: dict[str, Operation] = {
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_and": np.all,
    "reduce_or": np.any,
    "reduce_sum": np.sum,
}

NAMES = {
    *ROUNDED,
    *EXACT,
    *MOVES,
    *REDUCTIONS,
    "convert_element_type",
    *(name.lstrip("_") for module in (jnp, jax.lax) for name in dir(module)),
    *("multi_slice", "reduce_all", "reduce_any", "reduce_max", "reduce_min", "reduce_sum", "broadcast_arrays"),
}
"""The names of functions of JAX: what a test or the library compiles has others."""
