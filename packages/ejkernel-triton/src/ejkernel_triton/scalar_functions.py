"""Generates Triton functions from scalar programs: `score_mod` and `mask_mod` of tiles of scores.

    %5 = sub %3 %4        def score_mod_0f3a(score, b, h, q_idx, k_idx, arrays, FAST: tl.constexpr):
    %6 = abs %5     -->       v5 = q_idx - k_idx
                              v6 = tl.abs(v5)

Arrays are in one buffer of words, `arrays`; the name of a function has a hash of its source, so that equal functions
are compiled once, and different ones have different names in Triton's cache.
"""

import functools
import hashlib
import linecache
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning.scalar_programs import ScalarNode, ScalarProgram

Shapes = tuple[tuple[int, ...], ...]
MAX_WORDS = 2**31
"""Words of the buffer that 32-bit offsets reach."""
INFIX = {
    "add": "+",
    "and": "&",
    "eq": "==",
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "mul": "*",
    "ne": "!=",
    "or": "|",
    "sub": "-",
    "xor": "^",
}
FUNCTIONS = {
    "abs": "tl.abs",
    "exp": "tl.exp",
    "exp2": "tl.exp2",
    "log": "tl.log",
    "max": "tl.maximum",
    "min": "tl.minimum",
    "pow": "power",
    "rsqrt": "tl.rsqrt",
    "sqrt": "tl.sqrt",
}
TEMPLATES = {
    "clamp": "tl.minimum(tl.maximum({1}, {0}), {2})",
    "log1p": "tl.log(1.0 + {0})",
    "logistic": "(1.0 / (1.0 + tl.exp(-{0})))",
    "neg": "-{0}",
    "rem": "{0} % {1}",
    "select_n": "tl.where({0}, {2}, {1})",
    "shift_left": "tl.where(({1} >= 0) & ({1} < 32), {0} << {1}, 0)",
    "shift_right_arithmetic": "{0} >> tl.where(({1} >= 0) & ({1} < 32), {1}, 31)",
    "shift_right_logical": "tl.where(({1} >= 0) & ({1} < 32), ({0}.to(tl.uint32) >> {1}).to(tl.int32), 0)",
    "tanh": "tanh({0}, {fast})",
}


def pack_arrays(arrays: Iterable[jax.Array]) -> jax.Array:
    """Returns the elements of arrays one after the other, as words of 32 bits: int32 [1, words], at least one."""
    words = [jnp.zeros(1, jnp.int32)]
    for array in arrays:
        kind = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
        words.append(lax.bitcast_convert_type(array.astype(kind), jnp.int32).reshape(-1))
    return jnp.concatenate(words[1:] or words)[None]


@functools.lru_cache(maxsize=256)
def triton_function(
    name: str, program: ScalarProgram, shapes: Shapes, first_word: int, derivative: int | None = None
) -> Any:
    """Returns the `triton.jit` function of a program.

    Args:
        name: Beginning of its name.
        program: The program.
        shapes: Shapes of the arrays that it loads elements of.
        first_word: Where the first of them begins in the buffer.
        derivative: A node that is returned in place of the derivative by the score; None for that.

    Returns:
        A function of the inputs of the program, of the buffer, and of whether tanh may be approximate. For a program
        with a score it returns the result and its derivative by the score, otherwise the result.
    """
    import triton
    import triton.language as tl

    from ejkernel_triton.blocks import power, tanh

    body = _function_body(program, shapes, first_word, program.slope if derivative is None else derivative)
    name = f"{name}_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    inputs = "b, h, q_idx, k_idx" if program.slope is None else "score, b, h, q_idx, k_idx"
    source = f"def {name}({inputs}, arrays, FAST: tl.constexpr):\n{body}"
    # Triton reads a function's source by its file name, which may exist only in Python's `linecache`.
    file_name = f"<ejkernel_triton {name}>"
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    names: dict[str, Any] = {"tl": tl, "tanh": tanh, "power": power, "__name__": "ejkernel_triton.generated"}
    exec(compile(source, file_name, "exec"), names)
    return triton.jit(names[name])


def _function_body(program: ScalarProgram, shapes: Shapes, first_word: int, derivative: int | None) -> str:
    offsets = [first_word + sum(math.prod(shape) for shape in shapes[:n]) for n in range(len(shapes))]
    results = [program.result] if derivative is None else [program.result, derivative]
    live = sorted(set().union(*(program.live_nodes(n) for n in results)))
    expressions: dict[int, str] = {}
    lines: list[str] = []
    for n in live:
        node = program.nodes[n]
        operands = [expressions[x] for x in node.operands]
        kinds = [program.nodes[x].dtype for x in node.operands]
        if not node.operands and node.operation != "load":
            expressions[n] = _constant(node) if node.operation == "constant" else node.operation
            continue
        if node.operation == "load":
            array: Any = node.value
            expression = _load(node, operands, shapes[array], offsets[array])
        else:
            expression = _expression(node, operands, kinds, "FAST" if "score" in program.reads[n] else "False")
        lines.append(f"    v{n} = {expression}\n")
        expressions[n] = f"v{n}"
    returned = [expressions[n] for n in results]
    if program.slope is not None and "score" not in program.reads[program.result]:
        returned[0] = f"tl.zeros_like(score) + {returned[0]}"
    return "".join(lines) + f"    return {', '.join(returned)}\n"


def _constant(node: ScalarNode) -> str:
    value: Any = node.value
    if node.dtype == "bool":
        return f"tl.full([1, 1], {int(value)}, tl.int1)"
    if node.dtype == "float32":
        return repr(float(value)) if math.isfinite(value) else f'float("{value}")'
    return f"({int(value)})"


def _load(node: ScalarNode, indices: Sequence[str], shape: tuple[int, ...], offset: int) -> str:
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    terms = [str(offset), *(f"{index} * {stride}" for index, stride in zip(indices, strides, strict=True))]
    word = f"tl.load(arrays + ({' + '.join(terms)}))"
    kinds = {"bool": f"{word} != 0", "int32": word}
    return kinds.get(node.dtype, f"{word}.to(tl.float32, bitcast=True)")


def _expression(node: ScalarNode, operands: Sequence[str], kinds: Sequence[str], fast: str) -> str:
    """Returns the Triton expression of an operation."""
    name, kind = node.operation, kinds[0]
    special: dict[str, Callable[[], str]] = {
        "convert_element_type": lambda: (
            f"{operands[0]} != 0" if node.dtype == "bool" else _cast(operands[0], node.dtype)
        ),
        # Triton divides integers as C does: towards zero, as XLA does too.
        "div": lambda: f"{operands[0]} {'//' if kind == 'int32' else '/'} {operands[1]}",
        "integer_pow": lambda: _power(operands[0], kind, node.value),
        "not": lambda: f"{operands[0]} == 0" if kind == "bool" else f"~{operands[0]}",
        "sign": lambda: _sign(operands[0], kind),
    }
    if name in special:
        return special[name]()
    if kind == "bool" and name in ("max", "min", "mul"):
        return f"{operands[0]} {'|' if name == 'max' else '&'} {operands[1]}"
    if name in INFIX:
        return f"{operands[0]} {INFIX[name]} {operands[1]}"
    if name in FUNCTIONS:
        return f"{FUNCTIONS[name]}({', '.join(operands)})"
    return TEMPLATES[name].format(*operands, fast=fast)


def _cast(x: str, dtype: str) -> str:
    return f"{x}.to(tl.{dtype})"


def _sign(x: str, kind: str) -> str:
    one = "1.0" if kind == "float32" else "1"
    return f"tl.where({x} > 0, {one}, tl.where({x} < 0, -{one}, {x}))"


def _power(x: str, kind: str, exponent: Any) -> str:
    """Returns a constant power as a product."""
    one, divide = ("1.0", "/") if kind == "float32" else ("1", "//")
    product = " * ".join([x] * abs(exponent)) or one
    return f"{one} {divide} ({product})" if exponent < 0 else product
