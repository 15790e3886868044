"""Functions of a query and a key that a caller writes: `score_mod` changes a score, `mask_mod` says which pairs attend.

A caller's function takes scalars, and reads arrays by closing over them. `PairFunction` is that function as a pytree:
the arrays that it closes over are the leaves, so that `jit`, `vmap`, `grad` and `shard_map` handle them like any other
argument. The rest is a program that is compared by what it computes, so that two equal functions are compiled once.

The argument names and meanings are those of `torch.nn.attention.flex_attention`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _compat
from ejkernel.types.arguments import arguments, static

if TYPE_CHECKING:  # `jax.extend` imports Pallas, which calls without these functions have no use for
    from jax.extend.core import Jaxpr

INDEX_NAMES = ("b", "h", "q_idx", "k_idx")
"""The integer arguments of the functions, in order: batch row, query head, query and key, by index in the call."""


@dataclasses.dataclass(frozen=True, eq=False)
class PairProgram:
    """What a function of a pair computes, apart from the arrays that it closes over.

    Attributes:
        jaxpr: Its constants are the arrays that the function closes over; its inputs are scalars, in order the score,
            if it has one, and the four indices.
    """

    jaxpr: "Jaxpr"

    @functools.cached_property
    def key(self) -> Hashable:
        """Returns a key that is equal for programs that compute the same."""
        return _jaxpr_key(self.jaxpr)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PairProgram) and self._hash == other._hash and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = sorted({eqn.primitive.name for eqn in self.jaxpr.eqns})
        return f"PairProgram({','.join(names)})"

    @functools.cached_property
    def inputs_read(self) -> frozenset[str]:
        """Returns the names of the indices that the result may depend on."""
        return frozenset(name for name, variable in self._indices() if self._depends_on(variable))

    @functools.cached_property
    def takes_wider_arrays(self) -> bool:
        """Returns whether it can be evaluated with its captured 16-bit arrays in float32, so that their gradients are
        summed in float32.

        Most functions read an entry and add it to the score. One that multiplies entries with each other cannot.
        """
        avals: list[Any] = [v.aval for v in (*self.jaxpr.constvars, *self.jaxpr.invars)]
        narrow = [_is_narrow(aval.dtype) and n < len(self.jaxpr.constvars) for n, aval in enumerate(avals)]
        if not any(narrow) or _has_inner_functions(self.jaxpr):
            return False
        shapes = [
            jax.ShapeDtypeStruct(aval.shape, jnp.float32 if widen else aval.dtype)
            for aval, widen in zip(avals, narrow, strict=True)
        ]
        try:
            jax.eval_shape(lambda *values: _evaluate(self.jaxpr, list(values)), *shapes)
        except (TypeError, ValueError):  # an operation with operands of two dtypes
            return False
        return True

    def _indices(self) -> Iterator[tuple[str, Any]]:
        return zip(INDEX_NAMES, self.jaxpr.invars[-len(INDEX_NAMES) :], strict=True)

    def _depends_on(self, variable: Any) -> bool:
        reached = {variable}
        for eqn in self.jaxpr.eqns:
            if any(not _is_literal(x) and x in reached for x in eqn.invars):
                reached.update(eqn.outvars)
        return any(not _is_literal(x) and x in reached for x in self.jaxpr.outvars)


@arguments
class PairFunction:
    """A function of a query and a key: scalars in, a scalar out.

    Attributes:
        captured: The arrays that the caller's function closes over.
        program: What it computes.
    """

    captured: tuple[Any, ...]
    program: PairProgram = static()

    def __call__(self, *scalars: Any) -> jax.Array:
        """Returns the result for the scalars: the score, if the function has one, and the four indices."""
        jaxpr = self.program.jaxpr
        keep = self.program.takes_wider_arrays
        captured = [
            x if keep and _is_wider(x, v) else _as_dtype_of(v, x)
            for v, x in zip(jaxpr.constvars, self.captured, strict=True)
        ]
        inputs = [_as_dtype_of(v, x) for v, x in zip(jaxpr.invars, scalars, strict=True)]
        result: Any = jaxpr.outvars[0].aval
        # A function may return a Python number.
        return jnp.asarray(_evaluate(jaxpr, [*captured, *inputs])[0], result.dtype)

    def of_pairs(self, *arrays: jax.Array) -> jax.Array:
        """Returns the results for arrays of one rank, whose axes of size 1 broadcast.

        What depends only on arguments of size 1 along an axis is computed once for that axis: a mask that does not
        depend on the head is computed for one head.
        """
        return _call_elementwise(self, arrays)


def score_function(name: str, function: Any, dtype: Any) -> PairFunction | None:
    """Returns a caller's `score_mod` as a `PairFunction`; None for None.

    Args:
        name: The argument's name, for messages.
        function: `(score, b, h, q_idx, k_idx) -> score`.
        dtype: The dtype of the scores.

    Raises:
        ValueError: It is no function of these arguments, or its result is no real scalar.
    """
    if function is None or isinstance(function, PairFunction):
        return function
    traced = _traced(name, function, ("score", *INDEX_NAMES), jnp.dtype(dtype))
    result: Any = traced.program.jaxpr.outvars[0].aval
    if result.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{name}: got a function that returns {result.str_short()}, wants a floating scalar")
    return traced


def mask_function(name: str, function: Any) -> PairFunction | None:
    """Returns a caller's `mask_mod` as a `PairFunction`; None for None.

    Its result has no derivative, so nothing is differentiated through the arrays that it closes over.

    Args:
        name: The argument's name, for messages.
        function: `(b, h, q_idx, k_idx) -> bool`, True where the pair attends.

    Raises:
        ValueError: It is no function of these arguments, or its result is no bool scalar.
    """
    if function is None or isinstance(function, PairFunction):
        return function
    traced = _traced(name, function, INDEX_NAMES)
    result: Any = traced.program.jaxpr.outvars[0].aval
    if result.shape or result.dtype != jnp.bool_:
        raise ValueError(f"{name}: got a function that returns {result.str_short()}, wants a bool scalar")
    return dataclasses.replace(traced, captured=tuple(jax.lax.stop_gradient(x) for x in traced.captured))


def _traced(name: str, function: Any, parameters: tuple[str, ...], score: Any = None) -> PairFunction:
    """Returns the function as a `PairFunction`, traced with scalars."""
    if not callable(function):
        raise ValueError(f"{name}: got {type(function).__name__}, wants a function ({', '.join(parameters)})")
    _check_parameters(name, function, parameters)
    scalars = [jax.ShapeDtypeStruct((), score if name == "score" else jnp.int32) for name in parameters]
    # A new lambda, which JAX has no trace of: the function may read arrays and numbers that have changed since.
    closed = jax.make_jaxpr(lambda *values: _checked_result(name, function(*values)))(*scalars)
    if len(closed.jaxpr.outvars) != 1:
        raise ValueError(f"{name}: got a function with {len(closed.jaxpr.outvars)} results, wants one scalar")
    if _has_constants_in_calls(closed.jaxpr):
        # The arrays of inner functions become captured ones, which is where every kernel looks for arrays.
        nested = closed
        closed = jax.make_jaxpr(lambda *values: _evaluate(nested.jaxpr, [*nested.consts, *values])[0])(*scalars)
    return PairFunction(captured=tuple(map(jnp.asarray, closed.consts)), program=PairProgram(closed.jaxpr))


def _checked_result(name: str, result: Any) -> Any:
    for leaf in jax.tree.leaves(result):
        is_numpy = isinstance(leaf, np.ndarray | np.generic)
        has_number = is_numpy and (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number))
        if not has_number and not isinstance(leaf, bool | int | float | jax.Array):
            kind = f"{type(leaf).__name__} of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
            raise ValueError(f"{name}: got a function that returns {kind}, wants one scalar")
    return result


def _check_parameters(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        wants = ", ".join(parameters)
        raise ValueError(f"{name}: got a function of {signature}, wants a function of ({wants})") from None


def _as_dtype_of(variable: Any, x: Any) -> Any:
    """Returns an argument in the dtype that the function was traced with."""
    dtype = variable.aval.dtype
    return jnp.asarray(x).astype(dtype) if jnp.issubdtype(dtype, jnp.number) else x


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _is_wider(x: Any, variable: Any) -> bool:
    return _is_narrow(variable.aval.dtype) and x.dtype == jnp.float32


def _is_literal(x: Any) -> bool:
    from jax.extend.core import Literal

    return isinstance(x, Literal)


def literal_value(literal: Any) -> np.ndarray:
    """Returns the value of a literal without the mesh that it was traced under."""
    return np.asarray(literal.val, literal.aval.dtype)


def _is_jaxpr(value: Any) -> bool:
    from jax.extend.core import ClosedJaxpr, Jaxpr

    return isinstance(value, ClosedJaxpr | Jaxpr)


def _has_inner_functions(jaxpr: "Jaxpr") -> bool:
    """Returns whether an operation of a jaxpr has an inner jaxpr of fixed dtypes; those of `jit` are inlined."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            if _has_inner_functions(eqn.params["jaxpr"].jaxpr):
                return True
        elif any(_is_jaxpr(x) for x in jax.tree.leaves(list(eqn.params.values()))):
            return True
    return False


def _has_constants_in_calls(jaxpr: "Jaxpr") -> bool:
    """Returns whether a function of `jit` in a jaxpr closes over arrays."""
    inner = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    return any(closed.consts or _has_constants_in_calls(closed.jaxpr) for closed in inner)


def _evaluate(jaxpr: "Jaxpr", values: list[Any]) -> list[Any]:
    """Returns the results of a jaxpr, given its constants and inputs.

    Operations run under the current mesh. JAX's own evaluation would use the mesh of the trace instead, whose axes are
    explicit if the call is sharded by the types of its arrays, while the kernel runs under `shard_map`.
    """
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(x: Any) -> Any:
        return literal_value(x) if _is_literal(x) else known[x]

    for eqn in jaxpr.eqns:
        inputs, primitive = list(map(read, eqn.invars)), eqn.primitive
        inputs = _compat.as_varying(inputs, inputs)  # indices of a shard vary over the mesh, constants do not
        if primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            results = _evaluate(inner.jaxpr, [*inner.consts, *inputs])
        else:
            results = primitive.bind(*inputs, **primitive.get_bind_params(eqn.params))
            results = results if primitive.multiple_results else [results]
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _call_elementwise(function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> jax.Array:
    if not arrays[0].ndim:
        return function(*arrays)
    axes = [None if x.shape[0] == 1 else 0 for x in arrays]
    arrays = tuple(x[0] if axis is None else x for x, axis in zip(arrays, axes, strict=True))

    def inner(*parts: jax.Array) -> jax.Array:
        return _call_elementwise(function, parts)

    return inner(*arrays)[None] if all(axis is None for axis in axes) else jax.vmap(inner, in_axes=axes)(*arrays)


def _jaxpr_key(jaxpr: "Jaxpr") -> Hashable:
    """Returns a key that is equal for jaxprs that compute the same; variables are numbered in order of first use."""
    numbers: dict[Any, int] = {}

    def place(x: Any) -> Hashable:
        if _is_literal(x):
            return str(x.aval), _value_key(np.asarray(x.val))
        return numbers.setdefault(x, len(numbers))

    inputs = tuple((place(x), str(x.aval)) for x in (*jaxpr.constvars, *jaxpr.invars))
    steps = tuple(
        (
            eqn.primitive,
            tuple(map(place, eqn.invars)),
            tuple((place(x), str(x.aval)) for x in eqn.outvars),
            tuple((name, _value_key(value)) for name, value in sorted(eqn.params.items())),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, steps, tuple(map(place, jaxpr.outvars))


@dataclasses.dataclass(frozen=True, eq=False)
class _SameObject:
    """A key of an object that is equal to nothing but itself, and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _value_key(value: Any) -> Hashable:
    """Returns a key of a parameter of an operation; a value that cannot be compared is equal only to itself."""
    if _is_jaxpr(value):
        constants = tuple(map(_SameObject, getattr(value, "consts", ())))
        return _jaxpr_key(getattr(value, "jaxpr", value)), constants
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes() if value.dtype != object else _SameObject(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, dict):
        return dict, tuple(sorted((str(name), _value_key(x)) for name, x in value.items()))
    if isinstance(value, float):
        return float, value.hex()
    try:
        hash(value)
    except TypeError:
        return _SameObject(value)
    return type(value), value
