"""Translates `score_mod` and `mask_mod` into scalar operations, for kernels that cannot evaluate JAX functions.

    table[h] * jnp.abs(q_idx - k_idx)    -->    %0 = h           %3 = q_idx    %5 = sub %3 %4    %7 = convert %6
                                                %2 = load(0) %0  %4 = k_idx    %6 = abs %5       %8 = mul %2 %7

What reads no index, such as `2 * table`, is computed by XLA before the kernel: a program loads single elements of the
results, by indices that it may compute from all of its inputs. An operation that no kernel has is a refusal.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from ejkernel.planning.scalar_operations import (
    DTYPES,
    LOADED_DTYPES,
    OPERATIONS,
    ZERO,
    compute_node,
    simplified,
    unknown_dtype,
)
from ejkernel.planning.scalar_operations import ScalarNode as ScalarNode  # kernels import it from here
from ejkernel.types.pair_functions import INDEX_NAMES, PairFunction, PairProgram

if TYPE_CHECKING:  # `jax.extend` imports Pallas, which calls without these functions do not need
    from jax.extend.core import Jaxpr

INPUTS = ("score", *INDEX_NAMES)
"""The inputs of a program, each an operation without operands."""
CALL_PRIMITIVES = frozenset({"jit", "closed_call", "custom_jvp_call"})
"""Operations that call an inner program, which is translated in their place."""
VALUE_PRESERVING = frozenset(
    {"copy", "copy_p", "broadcast_in_dim", "reshape", "squeeze", "stop_gradient", "expand_dims"}
)
"""Operations that leave a scalar as it is."""


@dataclasses.dataclass(frozen=True)
class ScalarProgram:
    """A function of a pair as scalar operations; equal for functions that compute the same.

    Attributes:
        nodes: The operations, each after its operands.
        result: The node of the result.
        slope: The node of the result's derivative by the score; None for a function without a score.
        array_ranks: The number of axes of each array that it loads elements of.
        refusals: Why kernels cannot compute it.
    """

    nodes: tuple[ScalarNode, ...]
    result: int
    slope: int | None
    array_ranks: tuple[int, ...]
    refusals: tuple[str, ...]

    @functools.cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """Returns the inputs that each node depends on."""
        inputs: list[frozenset[str]] = []
        for node in self.nodes:
            input_read = frozenset({node.operation} & set(INPUTS))
            inputs.append(input_read.union(*(inputs[n] for n in node.operands)))
        return tuple(inputs)

    def live_nodes(self, result: int) -> tuple[int, ...]:
        """Returns the nodes that a node depends on, and itself, in order."""
        return _live_nodes(self, result)

    def reads_both(self, node: int) -> bool:
        """Returns whether a node depends on both the query and the key."""
        return self.reads[node] >= {"q_idx", "k_idx"}

    def terms(self) -> tuple[int, ...]:
        """Returns the nodes of bools that all have to hold for the result."""
        terms = [self.result]
        while any(self.nodes[n].operation == "and" for n in terms):
            terms = [x for n in terms for x in (self.nodes[n].operands if self.nodes[n].operation == "and" else (n,))]
        return tuple(dict.fromkeys(terms))

    @property
    def inputs_read(self) -> frozenset[str]:
        """Returns the inputs that the result depends on."""
        return self.reads[self.result]

    @property
    def has_constant_slope(self) -> bool:
        """Returns whether the derivative by the score is 1 everywhere."""
        return self.slope is None or (self.nodes[self.slope].operation, self.nodes[self.slope].value) == ("constant", 1)


@dataclasses.dataclass(frozen=True, eq=False)
class _ArrayView:
    """Elements of an array that a program has not read yet: for every axis of the array the node of its index, or None
    for an axis that is whole.
    """

    array: int
    indices: tuple[int | None, ...]


@functools.lru_cache(maxsize=256)
def _live_nodes(program: ScalarProgram, result: int) -> tuple[int, ...]:
    needed = {result}
    for n in range(result, -1, -1):
        if n in needed:
            needed.update(program.nodes[n].operands)
    return tuple(sorted(needed))


def scalar_program(function: PairFunction) -> ScalarProgram:
    """Returns the scalar operations of a function."""
    return _translate_program(function.program)[0]


def loaded_arrays(function: PairFunction) -> tuple[jax.Array, ...]:
    """Returns the arrays whose elements a function's scalar program loads, computed from its captured arrays."""
    return tuple(_translate_program(function.program)[1](function.captured))


@functools.lru_cache(maxsize=256)
def derivatives_by_loads(program: ScalarProgram) -> tuple[ScalarProgram, dict[int, int]]:
    """Returns a program with further nodes: the derivatives of the result by the floating elements that it loads.

    Args:
        program: A program without refusals.

    Returns:
        The program, whose nodes begin with those of the given one; and the node of the derivative by each load.
    """
    live = program.live_nodes(program.result)
    loads = [n for n in live if program.nodes[n].operation == "load" and program.nodes[n].dtype == "float32"]
    if not loads:
        return program, {}
    inputs = [n for n in live if program.nodes[n].operation in (*INPUTS, "load") and n not in loads]

    def run(loaded_values: list[Any], input_values: list[Any]) -> Any:
        values = dict(zip((*loads, *inputs), (*loaded_values, *input_values), strict=True))
        for n in live:
            node = program.nodes[n]
            if node.operation == "constant":
                values[n] = jnp.asarray(node.value, node.dtype)
            elif n not in values:
                values[n] = compute_node(node, [values[x] for x in node.operands])
        return values[program.result]

    shapes = [[jax.ShapeDtypeStruct((), program.nodes[n].dtype) for n in group] for group in (loads, inputs)]
    jaxpr = jax.make_jaxpr(jax.grad(run))(*shapes).jaxpr
    builder = _Builder((), program.nodes)
    env: dict[Any, Any] = dict(zip(jaxpr.invars, (*loads, *inputs), strict=True))
    with _computing_constants():
        results = builder.translate(jaxpr, env)
    nodes = [0 if x is None else x for x in results]
    refusals = tuple(dict.fromkeys(builder.refusals))
    extended = dataclasses.replace(program, nodes=tuple(builder.nodes), refusals=refusals)
    return extended, dict(zip(loads, nodes, strict=True))


@functools.lru_cache(maxsize=256)
def _translate_program(program: PairProgram) -> tuple[ScalarProgram, Callable[[Sequence[Any]], list[Any]]]:
    """Returns a function's scalar operations, and a function of the captured arrays that returns those it loads."""
    jaxpr, num_captured = _flat_jaxpr(program), len(program.jaxpr.constvars)
    has_score = len(program.jaxpr.invars) > len(INDEX_NAMES)
    builder = _Builder(jaxpr.invars[:num_captured])
    names = INPUTS if has_score else INDEX_NAMES
    scalars: list[Any] = list(jaxpr.invars[num_captured:])
    env: dict[Any, Any] = {x: builder.add(name, (), x.aval.dtype) for name, x in zip(names, scalars, strict=True)}
    with _computing_constants():
        results = builder.translate(jaxpr, env)
    nodes = [0 if x is None else x for x in results]  # a refused function has no result
    translated = ScalarProgram(
        nodes=tuple(builder.nodes),
        result=nodes[0],
        slope=nodes[1] if has_score else None,
        array_ranks=tuple(len(x.aval.shape) for x in builder.arrays),
        refusals=tuple(dict.fromkeys(builder.refusals)),
    )
    return translated, builder.compute_arrays


@contextlib.contextmanager
def _computing_constants() -> Generator[None]:
    """Computes operations of constants on one device, also where a call is traced for the shards of a mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.ensure_compile_time_eval():
        yield


def _flat_jaxpr(program: PairProgram) -> "Jaxpr":
    """Returns the program of a function and, if it has a score, of its derivative by the score; its inputs are the
    captured arrays, those of 16 bits in float32 if the function can be evaluated with them, and then the scalars.
    """
    has_score = len(program.jaxpr.invars) > len(INDEX_NAMES)

    def run(captured: tuple[Any, ...], *scalars: Any) -> Any:
        function = PairFunction(captured=captured, program=program)
        if not has_score:
            return function(*scalars)
        score, *indices = scalars
        return jax.jvp(lambda x: function(x, *indices), (score,), (jnp.ones((), score.dtype),))

    def widened_dtype(dtype: Any) -> Any:
        narrow = program.takes_wider_arrays and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        return jnp.float32 if narrow else dtype

    avals: list[Any] = [x.aval for x in program.jaxpr.constvars]
    captured = tuple(jax.ShapeDtypeStruct(x.shape, widened_dtype(x.dtype)) for x in avals)
    scalars: list[Any] = [x.aval for x in program.jaxpr.invars]
    shapes = [jax.ShapeDtypeStruct((), x.dtype) for x in scalars]
    return jax.make_jaxpr(run)(captured, *shapes).jaxpr


class _Builder:
    """Translates a jaxpr into nodes; equal operations become one node, and those of constants are computed."""

    def __init__(self, captured: Sequence[Any], nodes: Sequence[ScalarNode] = ()) -> None:
        self.nodes: list[ScalarNode] = list(nodes)
        self.refusals: list[str] = []
        self.arrays: list[Any] = []
        self._captured = captured
        self._hoisted = set(captured)  # variables that depend on no index and no score: computed before the kernel
        self._hoisted_equations: list[Any] = []
        self._index_by_node: dict[ScalarNode, int] = {node: n for n, node in enumerate(nodes)}

    def compute_arrays(self, captured: Sequence[Any]) -> list[Any]:
        """Returns the arrays that the program loads elements of."""
        env = dict(zip(self._captured, captured, strict=True))
        for eqn in self._hoisted_equations:
            inputs = [x.val if _is_literal(x) else jnp.asarray(env[x]).astype(x.aval.dtype) for x in eqn.invars]
            results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            env.update(zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True))
        return [env[x] for x in self.arrays]

    def add(self, operation: str, operands: tuple[int, ...], dtype: Any, value: Any = None) -> int:
        """Returns the index of a node in `nodes`, after adding it unless there is an equal one."""
        node = ScalarNode(operation, operands, str(jnp.dtype(dtype)), value)
        if node not in self._index_by_node:
            self._index_by_node[node] = len(self.nodes)
            self.nodes.append(node)
        return self._index_by_node[node]

    def constant(self, value: Any, dtype: Any) -> int:
        return self.add("constant", (), dtype, np.asarray(value, dtype).item())

    def translate(self, jaxpr: "Jaxpr", env: dict[Any, Any]) -> list[int | None]:
        """Returns the nodes of a jaxpr's results, given those of its inputs; None for one that is refused."""
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CALL_PRIMITIVES:
                inner_jaxpr = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                inputs = [self._read(x, env) for x in eqn.invars]
                constants = [self.constant(x, np.asarray(x).dtype) for x in inner_jaxpr.consts]
                inner_env = dict(
                    zip((*inner_jaxpr.jaxpr.constvars, *inner_jaxpr.jaxpr.invars), (*constants, *inputs), strict=True)
                )
                env.update(zip(eqn.outvars, self.translate(inner_jaxpr.jaxpr, inner_env), strict=True))
            elif self._is_hoisted(eqn):
                self._hoisted.update(eqn.outvars)
                self._hoisted_equations.append(eqn)
            else:
                env.update(zip(eqn.outvars, [self._translate_equation(eqn, env)], strict=False))
        return [self._as_node(self._read(x, env)) for x in jaxpr.outvars]

    def _is_hoisted(self, eqn: Any) -> bool:
        inputs = [x for x in eqn.invars if not _is_literal(x)]
        return bool(inputs) and all(x in self._hoisted for x in inputs)

    def _read(self, x: Any, env: dict[Any, Any]) -> Any:
        """Returns the node, or the view of an array, of an operand; None if it is refused."""
        if _is_literal(x):
            return self.constant(x.val, x.aval.dtype)
        if x in self._hoisted and x not in env:
            if str(x.aval.dtype) not in LOADED_DTYPES:
                self.refusals.append(f"reads an array of {x.aval.dtype}, the kernels load {', '.join(LOADED_DTYPES)}")
            self.arrays.append(x)
            env[x] = _ArrayView(len(self.arrays) - 1, (None,) * len(x.aval.shape))
        return env.get(x)

    def _as_node(self, x: Any) -> int | None:
        """Returns the node of an operand; of an array without an axis that is whole, the load of its element."""
        if not isinstance(x, _ArrayView):
            return x
        aval = self.arrays[x.array].aval
        unindexed_axes = [n for n, index in enumerate(x.indices) if index is None and aval.shape[n] != 1]
        if unindexed_axes:
            self.refusals.append(f"computes with all of an array {aval.str_short()} for every pair")
            return None
        zero = self.constant(0, jnp.int32)
        return self.add("load", tuple(zero if n is None else n for n in x.indices), aval.dtype, x.array)

    def _translate_equation(self, eqn: Any, env: dict[Any, Any]) -> Any:
        name, (result, *_) = eqn.primitive.name, eqn.outvars
        operands = [self._read(x, env) for x in eqn.invars]
        if any(x is None for x in operands):  # its operand is refused
            return None
        if name == "dynamic_slice" and isinstance(operands[0], _ArrayView):
            return self._slice_view(operands[0], operands[1:], eqn.params["slice_sizes"], eqn.invars[0].aval.shape)
        if name in VALUE_PRESERVING and _sizes_above_one(result) == _sizes_above_one(eqn.invars[0]):
            return operands[0]
        if name not in OPERATIONS | {"add_any", "one_minus_square"} or math.prod(result.aval.shape) != 1:
            self.refusals.append(f"has the operation {name}, which the kernels do not have")
            return None
        scalars = [self._as_node(x) for x in operands]
        if any(x is None for x in scalars):
            return None
        if kind := unknown_dtype(name, [str(x.aval.dtype) for x in (result, *eqn.invars)]):
            self.refusals.append(f"computes {name} of {kind}, the kernels have {', '.join(DTYPES)}")
            return None
        return self._add_operation(name, [x for x in scalars if x is not None], result.aval.dtype, eqn.params.get("y"))

    def _slice_view(self, view: _ArrayView, starts: list[Any], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Returns a view with further indices, clamped to the array as `dynamic_slice` does."""
        axes = [n for n, index in enumerate(view.indices) if index is None]
        indices, whole = list(view.indices), self.arrays[view.array].aval.shape
        axes = [n for n in axes if whole[n] != 1] if len(axes) != len(shape) else axes
        kept = [n for n, size in enumerate(shape) if size != 1] if len(axes) != len(shape) else list(range(len(shape)))
        for axis, n in zip(axes, kept, strict=True):
            if sizes[n] == shape[n]:
                continue
            if sizes[n] != 1:
                self.refusals.append(f"takes {sizes[n]} elements of an array at once, the kernels load single ones")
                return None
            start = self._as_node(starts[n])
            if start is None:
                return None
            limits = self.constant(0, jnp.int32), self.constant(shape[n] - 1, jnp.int32)
            indices[axis] = self._add_operation("clamp", [limits[0], start, limits[1]], jnp.int32)
        return _ArrayView(view.array, tuple(indices))

    def _add_operation(self, name: str, operands: list[int], dtype: Any, exponent: Any = None) -> int:
        name, nodes = "add" if name == "add_any" else name, [self.nodes[n] for n in operands]
        if name == "convert_element_type" and nodes[0].dtype == str(dtype):
            return operands[0]
        if name == "pow":  # an exponent may be an integer
            operands = [self._add_operation("convert_element_type", [x], dtype) for x in operands]
            nodes = [self.nodes[n] for n in operands]
        name, exponent = ("integer_pow", 2) if name == "square" else (name, exponent)
        if name == "one_minus_square":  # in the derivative of tanh, from JAX 0.11 on
            return self._add_operation(
                "sub", [self.constant(1, dtype), self._add_operation("square", operands, dtype)], dtype
            )
        simplified_node = simplified(name, nodes, operands)
        if simplified_node is not None:
            return simplified_node
        if name == "lt" and nodes[0].operation in INDEX_NAMES and nodes[1] == ZERO:
            return self.constant(False, dtype)  # JAX counts negative indices of an array from its end
        if all(x.operation == "constant" for x in nodes):
            values = [jnp.asarray(x.value, x.dtype) for x in nodes]
            return self.constant(compute_node(ScalarNode(name, (), str(jnp.dtype(dtype)), exponent), values), dtype)
        return self.add(name, tuple(operands), dtype, exponent)


def _sizes_above_one(x: Any) -> list[int]:
    return [n for n in x.aval.shape if n != 1]


def _is_literal(x: Any) -> bool:
    from jax.extend.core import Literal

    return isinstance(x, Literal)
