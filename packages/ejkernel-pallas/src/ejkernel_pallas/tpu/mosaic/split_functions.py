"""Splits `score_mod` and `mask_mod` into what XLA computes before the kernels, and what they compute for every pair.

    table[h] * jnp.abs(q_idx - k_idx) + biases[b, k_idx]
    ────────                            ────────────────   values of one head, one query or one key: XLA
             ─ ───────────────────────  ─                  scalars of the score or of both indices: the kernels

What does not read both the query and the key, arrays and their indexing included, is a *row*: [B|1, H|1, T, 1],
[B|1, H|1, 1, S] or one value per head. Kernels read rows by tiles, like a bias. What is left are operations on
scalars, which Mosaic has for vectors. An array that is indexed by both the query and the key is not served.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh

from ejkernel.types.pair_functions import INDEX_NAMES, PairFunction, PairProgram, literal_value

MAX_ROWS = 16
"""The largest number of rows of a function; each takes a block in VMEM."""
INLINED = frozenset({"jit", "closed_call"})
"""Operations that only call an inner program."""
UNCHANGED = frozenset({"copy", "copy_p", "broadcast_in_dim", "reshape", "squeeze", "stop_gradient"})
"""Operations that leave a scalar as it is."""
ARITHMETIC = "abs add add_any clamp convert_element_type div integer_pow max min mul neg pow rem round sign square sub"
FUNCTIONS = "cos erf exp exp2 floor log log1p logistic one_minus_square rsqrt sin sqrt tan tanh"
LOGIC = "and eq ge gt le lt ne not or select_n shift_left shift_right_arithmetic shift_right_logical xor"
ELEMENTWISE = frozenset(f"{ARITHMETIC} {FUNCTIONS} {LOGIC}".split())
"""Operations on scalars that the kernels compute for all pairs of a chunk."""
CONTROL_FLOW = frozenset({"cond", "scan", "while"})
"""Operations that compute with whole arrays, which the kernels do not have."""
DTYPES = ("float32", "int32", "bool")
"""The dtypes of values that the kernels compute with."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A value of a function that does not depend on both the query and the key.

    Attributes:
        program: What it computes from the captured arrays and the indices.
        reads: The indices that it reads.
        dtype: Its dtype.
        has_gradient: Whether it depends on captured arrays of floating-point numbers.
    """

    program: PairProgram
    reads: frozenset[str]
    dtype: Any
    has_gradient: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SplitFunction:
    """A function of a pair in two parts.

    Attributes:
        rows: The values that are computed before the kernels.
        pairs: Computes the result from the score, if the function has one, the rows, and the query's and key's index.
        derivatives: Compute the result's derivative from the same inputs: by the score, None, and by the index of a row
            that has a gradient. Empty without a score.
        refusals: Why the kernels cannot compute it.
    """

    rows: tuple[Row, ...]
    pairs: ClosedJaxpr
    derivatives: dict[int | None, ClosedJaxpr]
    refusals: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def split_function(program: PairProgram, *, computes_keys: bool = False) -> SplitFunction:
    """Returns the two parts of a function.

    Args:
        program: The function.
        computes_keys: Whether the kernels compute scalars of a key too, so that rows of keys are elements of arrays.
    """
    # Under a mesh, derivatives of scalars would have operations that place them.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return _split(program, computes_keys)


def _split(program: PairProgram, computes_keys: bool) -> SplitFunction:
    flat, captured = _flattened(program), len(program.jaxpr.constvars)
    reads, from_arrays = _dependences(flat, captured, flat.invars[:captured])
    _, from_floats = _dependences(flat, captured, [x for x in flat.invars[:captured] if _is_float(x)])
    score, query, key = flat.invars[captured : -len(INDEX_NAMES)], flat.invars[-2], flat.invars[-1]
    kept = {query, key, *score}
    if computes_keys:
        scalar_steps = [eqn for eqn in flat.eqns if _is_scalar_step(eqn)]
        kept |= {x for eqn in scalar_steps for x in eqn.outvars if "k_idx" in reads[x]}

    def is_row(x: Any) -> bool:
        of_pair = reads[x] >= {"q_idx", "k_idx"} or "score" in reads[x]
        return x not in kept and not of_pair and (bool(reads[x]) or x in from_arrays)

    steps, row_variables = _live(flat, flat.outvars, is_row)
    scalars: list[Any] = [x for x in row_variables if not x.aval.shape]
    rows = tuple(
        Row(_row_program(flat, captured, x), reads[x], x.aval.dtype, x in from_floats and _is_float(x)) for x in scalars
    )
    refusals = tuple(_refusals(steps, row_variables, rows))
    if refusals:
        return SplitFunction(rows, ClosedJaxpr(flat, ()), {}, refusals)
    return _with_derivatives(rows, flat, steps, (*score, *scalars, query, key), len(score))


def _with_derivatives(
    rows: tuple[Row, ...], flat: Jaxpr, steps: list[Any], inputs: tuple[Any, ...], scores: int
) -> SplitFunction:
    shapes = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in inputs]

    def value(*values: Any) -> Any:
        known = dict(zip(inputs, values, strict=True))
        _run(steps, known)
        (result,) = flat.outvars
        return literal_value(result) if isinstance(result, Literal) else known[result]

    def derivative(n: int) -> ClosedJaxpr:
        def of(*values: Any) -> Any:
            result, pull = jax.vjp(lambda x: value(*values[:n], x, *values[n + 1 :]), values[n])
            return pull(jnp.ones_like(result))[0]

        return _without_dead_steps(jax.make_jaxpr(of)(*shapes))

    pairs = _without_dead_steps(jax.make_jaxpr(value)(*shapes))
    inputs_by_key = {None: 0} | {n: 1 + n for n, row in enumerate(rows) if row.has_gradient}
    derivatives = {key: derivative(n) for key, n in inputs_by_key.items()} if scores else {}
    programs = [pairs, *derivatives.values()]
    refusals = dict.fromkeys(sentence for x in programs for sentence in _refusals(x.jaxpr.eqns, [], ()))
    return SplitFunction(rows, pairs, derivatives, tuple(refusals))


def _flattened(program: PairProgram) -> Jaxpr:
    """Returns the function's program with calls inlined; its inputs are the captured arrays, and then the scalars."""
    jaxpr = program.jaxpr
    inputs = (*jaxpr.constvars, *jaxpr.invars)

    def run(*values: Any) -> Any:
        known = dict(zip(inputs, values, strict=True))
        _run(jaxpr.eqns, known)
        (result,) = jaxpr.outvars
        return literal_value(result) if isinstance(result, Literal) else known[result]

    closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs))  # type: ignore[attr-defined]
    return closed.jaxpr


def _run(steps: Sequence[Any], known: dict[Any, Any]) -> None:
    """Adds the results of operations to the known values."""
    for eqn in steps:
        inputs = [literal_value(x) if isinstance(x, Literal) else known[x] for x in eqn.invars]
        if eqn.primitive.name in INLINED:
            inner: ClosedJaxpr = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            within = dict(zip((*inner.jaxpr.constvars, *inner.jaxpr.invars), (*inner.consts, *inputs), strict=True))
            _run(inner.jaxpr.eqns, within)
            results = [literal_value(x) if isinstance(x, Literal) else within[x] for x in inner.jaxpr.outvars]
        else:
            results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            results = results if eqn.primitive.multiple_results else [results]
        known.update(zip(eqn.outvars, results, strict=True))


def _dependences(flat: Jaxpr, captured: int, arrays: Sequence[Any]) -> tuple[dict[Any, frozenset[str]], set[Any]]:
    """Returns which scalars every variable depends on, and which variables depend on some of the captured arrays."""
    scalars, reached = flat.invars[captured:], set(arrays)
    names = ("score", *INDEX_NAMES)[-len(scalars) :]
    reads: dict[Any, frozenset[str]] = dict.fromkeys((*flat.constvars, *flat.invars[:captured]), frozenset())
    reads |= {x: frozenset({name}) for x, name in zip(scalars, names, strict=True)}
    for eqn in flat.eqns:
        inputs = [x for x in eqn.invars if not isinstance(x, Literal)]
        reads |= dict.fromkeys(eqn.outvars, frozenset().union(*(reads[x] for x in inputs)))
        if any(x in reached for x in inputs):
            reached.update(eqn.outvars)
    return reads, reached


def _live(jaxpr: Jaxpr, outputs: Sequence[Any], is_given: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    """Returns the operations that some variables depend on, and the given variables that these read."""
    needed = dict.fromkeys(x for x in outputs if not isinstance(x, Literal))
    steps: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(x in needed and not is_given(x) for x in eqn.outvars):
            needed |= dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal))
            steps.append(eqn)
    return steps[::-1], [x for x in needed if is_given(x)]


def _without_dead_steps(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    return ClosedJaxpr(jaxpr.replace(eqns=_live(jaxpr, jaxpr.outvars, lambda _: False)[0]), closed.consts)


def _row_program(flat: Jaxpr, captured: int, variable: Any) -> PairProgram:
    """Returns the program of one row: the arrays are its constants, the indices its inputs."""
    inputs = flat.invars
    needed = (*inputs[:captured], *inputs[-len(INDEX_NAMES) :])

    def run(*values: Any) -> Any:
        known = dict(zip(needed, values, strict=True))
        _run(_live(flat, [variable], lambda _: False)[0], known)
        return known[variable]

    row = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in needed)).jaxpr  # type: ignore[attr-defined]
    debug_info = jax.make_jaxpr(lambda *_: 0)(*(jax.ShapeDtypeStruct((), jnp.int32) for _ in INDEX_NAMES)).jaxpr
    return PairProgram(
        row.replace(constvars=row.invars[:captured], invars=row.invars[captured:], debug_info=debug_info.debug_info)
    )


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _refusals(steps: Sequence[Any], row_variables: Sequence[Any], rows: Sequence[Row]) -> Iterator[str]:
    """Yields why the kernels cannot compute operations for every pair."""
    arrays = [x for x in row_variables if x.aval.shape]
    if arrays and not any(eqn.primitive.name in CONTROL_FLOW for eqn in steps):
        kind = arrays[0].aval.str_short()
        yield f"got an array {kind} indexed by query and key together, the kernels index arrays by one of them"
        return
    names = dict.fromkeys(name for eqn in steps for name in _unknown_operations(eqn))
    if names:
        yield f"got {', '.join(names)} of both query and key or of the score, which the kernels do not have"
        return
    variables = [x for eqn in steps for x in (*eqn.invars, *eqn.outvars)]
    kinds = [str(x.aval.dtype) for x in variables] + [str(row.dtype) for row in rows]
    if others := dict.fromkeys(kind for kind in kinds if kind not in DTYPES):
        yield f"got values of {', '.join(others)} for pairs, the kernels have {', '.join(DTYPES)}"
    if len(rows) > MAX_ROWS:
        yield f"got {len(rows)} values of a head, query or key, the kernels take at most {MAX_ROWS}"


def _is_scalar_step(eqn: Any) -> bool:
    """Returns whether the kernels have an operation, and its operands and results are scalars."""
    dtypes = {str(x.aval.dtype) for x in (*eqn.invars, *eqn.outvars)}
    return dtypes <= set(DTYPES) and not any(_unknown_operations(eqn))


def _unknown_operations(eqn: Any) -> Iterator[str]:
    name = eqn.primitive.name
    if name in INLINED or name == "custom_jvp_call":
        inner: ClosedJaxpr = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        for step in inner.jaxpr.eqns:
            yield from _unknown_operations(step)
    elif name not in ELEMENTWISE | UNCHANGED or any(x.aval.shape for x in (*eqn.invars, *eqn.outvars)):
        yield name


def function_refusal_reasons(record: Any, *, computes_keys: bool = False) -> Iterator[str]:
    """Yields why kernels cannot compute the functions `score_mod` and `mask_mod` of a record; see `split_function`."""
    for name in ("score_mod", "mask_mod"):
        function = getattr(record, name)
        if function is not None:
            split = split_function(function.program, computes_keys=computes_keys)
            yield from (f"{name}: {reason}" for reason in split.refusals)


def row_values(function: PairFunction, rows: Sequence[Row], indices: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the rows of a function, each [B|1, H|1, T|1, S|1].

    Args:
        function: The function, whose captured floating arrays may be wider than it was traced with.
        rows: Its rows.
        indices: int32 [B, 1, 1, 1], [1, H, 1, 1], [1, 1, T, 1] and [1, 1, 1, S].
    """
    values = []
    for row in rows:
        read = [
            x if name in row.reads else x.reshape(-1)[:1].reshape(1, 1, 1, 1)
            for name, x in zip(INDEX_NAMES, indices, strict=True)
        ]
        values.append(PairFunction(captured=function.captured, program=row.program).of_pairs(*read))
    return values
