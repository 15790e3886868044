"""Evaluates scalar operands on the CPU, and lays them out as in scalar memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ejkernel.arithmetic import cdiv

_LANES = 128
_SUBLANES = 8
_CONTROL_FLOW_PRIMITIVES = ("while", "scan", "cond")
_INNER_JAXPR_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")

LazyValue = Callable[[], Any]


class _UnknownError(Exception):
    """The value depends on an argument of which only the shape is known."""


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """A `pallas_call` of a program.

    Attributes:
        name: The name of its kernel.
        grid: The grid, innermost axis last; a bound that is not static is text.
        scalar_operands: Values of its operands for scalar prefetch, and of its dynamic bounds, and after them of its
            other inputs, of which only those whose blocks are in scalar memory are evaluated; None if unknown.
    """

    name: str
    grid: tuple[int | str, ...]
    scalar_operands: tuple[np.ndarray[Any, Any] | None, ...]


def pallas_calls(function: Callable[..., Any], args: Sequence[Any], values: Sequence[Any]) -> list[PallasCall]:
    """Finds every `pallas_call` of a program, and the values of its scalar operands.

    Args:
        function: The program.
        args: Its arguments, with `jax.ShapeDtypeStruct` leaves.
        values: For every leaf its value, or None if only the shape is known.
    """
    evaluator = _JaxprEvaluator()
    leaves = [_raise_unknown if value is None else functools.partial(_constant, value) for value in values]
    evaluator.run(*_jaxpr_and_constants(jax.jit(function).trace(*args).jaxpr), leaves)
    return evaluator.calls


class _JaxprEvaluator:
    """Traverses the equations of a program; an intermediate value is evaluated only if a `pallas_call` needs it."""

    def __init__(self) -> None:
        self.calls: list[PallasCall] = []

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[LazyValue]) -> list[LazyValue]:
        known: dict[Any, LazyValue] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: functools.partial(_constant, c) for v, c in zip(jaxpr.constvars, constants, strict=True)}

        def read_variable(variable: Any) -> LazyValue:
            if isinstance(variable, jex_core.Literal):
                return functools.partial(_constant, variable.val)
            return known[variable]

        for equation in jaxpr.eqns:
            outputs = self._lazy_results_of_equation(equation, [read_variable(v) for v in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read_variable(v) for v in jaxpr.outvars]

    def _lazy_results_of_equation(self, equation: Any, inputs: list[LazyValue]) -> Sequence[LazyValue]:
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            self.calls.append(_describe_pallas_call(params, inputs))
            return [_raise_unknown] * len(equation.outvars)
        if name == "axis_index":  # the first device is simulated
            return [functools.partial(_constant, np.int32(0))]
        if name == "pvary":
            return inputs
        if _is_collective(params):
            return [_raise_unknown] * len(equation.outvars)
        inner = next((params[key] for key in _INNER_JAXPR_PARAMS if key in params), None)
        if inner is not None and name not in _CONTROL_FLOW_PRIMITIVES:
            jaxpr, constants = _jaxpr_and_constants(inner)
            if name == "shard_map":
                inputs = [
                    functools.partial(_first_shard, x, v.aval.shape) for x, v in zip(inputs, jaxpr.invars, strict=True)
                ]
            return self.run(jaxpr, constants, inputs)
        results = _cache_value(functools.partial(_evaluate_equation, equation, inputs))
        return [_cache_value(functools.partial(_read_result, results, k)) for k in range(len(equation.outvars))]


def _describe_pallas_call(params: Any, inputs: Sequence[LazyValue]) -> PallasCall:
    mapping = params["grid_mapping"]
    count = mapping.num_dynamic_grid_bounds + mapping.num_index_operands
    name = params.get("name") or str(params.get("name_and_src_info", ""))
    grid = tuple(size if isinstance(size, int) else str(size) for size in mapping.grid)
    blocks = mapping.block_mappings[: len(inputs) - count]
    known = [
        *inputs[:count],
        *(x if _is_in_scalar_memory(b) else _raise_unknown for x, b in zip(inputs[count:], blocks, strict=True)),
    ]
    return PallasCall(name.split(" ")[0], grid, tuple(map(_value_or_none, known)))


def _is_in_scalar_memory(block_mapping: Any) -> bool:
    """Returns whether the blocks of an input are copied to scalar memory."""
    return "smem" in str(getattr(block_mapping.transformed_block_aval, "memory_space", ""))


def _is_collective(params: Any) -> bool:
    """Returns whether an equation needs values of other devices, i.e. names axes of the mesh."""
    axes = params.get("axis_name", params.get("axes", ()))
    return any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))


def _first_shard(lazy_value: LazyValue, shape: tuple[int, ...]) -> Any:
    """Returns the first device's shard of an array."""
    return np.asarray(lazy_value())[tuple(slice(size) for size in shape)]


def _value_or_none(lazy_value: LazyValue) -> np.ndarray[Any, Any] | None:
    try:
        return np.asarray(lazy_value())
    except _UnknownError:
        return None


def _evaluate_equation(equation: Any, inputs: Sequence[LazyValue]) -> Sequence[Any]:
    values = [thunk() for thunk in inputs]
    with equation.ctx.manager:
        bound = equation.primitive.get_bind_params(equation.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        result = equation.primitive.bind(*functions, *values, **params)
    return result if equation.primitive.multiple_results else [result]


def _cache_value(lazy_value: LazyValue) -> LazyValue:
    """Caches the value of a thunk, and also that it is unknown, because programs use intermediate values more than
    once.
    """

    @functools.cache
    def value_and_whether_known() -> tuple[Any, bool]:
        try:
            return lazy_value(), True
        except _UnknownError:
            return None, False

    def value() -> Any:
        result, known = value_and_whether_known()
        if not known:
            raise _UnknownError
        return result

    return value


def _read_result(results: LazyValue, index: int) -> Any:
    return results()[index]


def _constant(value: Any) -> Any:
    return value


def _raise_unknown() -> Any:
    raise _UnknownError


def _jaxpr_and_constants(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants; an open jaxpr has none, and its constant variables are inputs."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def pack_words(values: Any) -> list[int]:
    """Returns the 32-bit words of an integer array in their memory layout in scalar memory.

    Vectors are packed. Arrays of more dimensions are stored in tiles of 128 columns and up to 8 rows, in which elements
    of less than 32 bits of neighbouring rows share a word.
    """
    array = np.asarray(values)
    if array.dtype == np.bool_:
        array = array.astype(np.int32)
    elements_per_word = max(1, 4 // array.dtype.itemsize)
    if array.ndim <= 1:
        flat = np.pad(array.reshape(-1), (0, -array.size % elements_per_word))
        return _to_words(flat)
    return _to_words(_to_memory_tiles(array, elements_per_word))


def _to_memory_tiles(array: np.ndarray[Any, Any], elements_per_word: int) -> np.ndarray[Any, Any]:
    rows, columns = array.shape[-2:]
    tile = _SUBLANES if rows >= _SUBLANES else max(elements_per_word, 1 << (rows - 1).bit_length())
    leading = int(np.prod(array.shape[:-2]))
    padded = np.zeros((leading, cdiv(rows, tile) * tile, cdiv(columns, _LANES) * _LANES), array.dtype)
    padded[:, :rows, :columns] = array.reshape(-1, rows, columns)
    grid = padded.reshape(leading, -1, tile, padded.shape[2] // _LANES, _LANES)
    tiles = grid.transpose(0, 1, 3, 2, 4)
    shared = tiles.reshape(*tiles.shape[:3], tile // elements_per_word, elements_per_word, _LANES).swapaxes(-1, -2)
    return np.ascontiguousarray(shared)


def _to_words(array: np.ndarray[Any, Any]) -> list[int]:
    words = array if array.dtype.itemsize == 4 else array.reshape(-1).view(np.int32)
    return words.reshape(-1).astype(np.int64).tolist()
