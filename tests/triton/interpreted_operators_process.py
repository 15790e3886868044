"""Operators of tensors in Triton's interpreter give the same bits the second time, when NumPy alone computes them;
prints nothing.

Where the interpreter is to find overflow, it finds that of the second sum, too.
"""

import operator

import numpy as np
import pytest
import triton  # noqa: TID251
import triton.language as tl  # noqa: TID251
from suite import interpreted_operators

from ejkernel_triton import _compat, interpreter

NUMBERS = (3, -2, 2.5, True)
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.mod)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
seen = []
interpreted_operators.install()


@triton.jit
def record(x_ptr, bits_ptr, size: tl.constexpr):
    """Every operator on tiles, rows, columns, scalars and numbers."""
    lanes = tl.arange(0, size)
    rows = tl.load(x_ptr + lanes)
    tile = rows[:, None] * rows[None, :] + 1
    whole, wide, mask = tl.load(bits_ptr + lanes), lanes.to(tl.int64), lanes < 3
    scalar, half = tl.load(x_ptr), rows.to(tl.float16)
    for function in (*ARITHMETIC, *COMPARISONS):
        seen.append(function(tile, rows[None, :]))
        seen.append(function(rows, scalar))
        seen.append(function(half, rows))
        seen.append(function(rows, whole))
        seen.append(function(whole, lanes + 1))
        for number in NUMBERS:
            seen.append(function(rows, number))
            seen.append(function(whole, number))
    for function in (operator.and_, operator.or_, operator.xor):
        seen.append(function(mask, lanes > 1))
        seen.append(function(whole, lanes))
    seen.append(3.0 - rows)
    seen.append(2 * wide)
    seen.append(bits_ptr + wide)
    seen.append(x_ptr + lanes)


@triton.jit
def multiply(x_ptr, y_ptr):
    """A product that may overflow."""
    tl.store(y_ptr, tl.load(x_ptr) * 4)


def product(number):
    return interpreter.run(multiply, [np.array([number], np.int32)], [np.zeros(1, np.int32)], 1, {}, {})


def results():
    """Returns the types and the bits of all results of a run."""
    seen.clear()
    floats = np.array([1.5, -2.25, 0.1, 7.0], np.float32)
    # The addresses of pointers are those of these arrays.
    interpreter.run(record, [floats, INTEGERS], [], 1, {"size": 4}, {})
    return [(x.type.name, x.handle.dtype.name, x.handle.data.dtype, x.handle.data.shape, x.handle.data) for x in seen]


INTEGERS = np.array([5, -7, 2, 9], np.int32)
first, second = results(), results()
known = [found for each in interpreted_operators._known.values() for found in each.values()]
assert sum(found is not None for found in known) > 60, known
assert len(first) == len(second) > 150
for one, other in zip(first, second, strict=True):
    assert one[:4] == other[:4]
    if not one[0].startswith(("pointer", "<['4'], pointer")):
        assert one[4].tobytes() == other[4].tobytes(), (one, other)

builder = _compat._interpreter_module().interpreter_builder
product(2), product(2**30)
fast = builder.options
builder.options = type(fast)(sanitize_overflow=True, debug=True)
product(2)
with pytest.raises(Exception, match="overflow detected"):
    product(2**30)
builder.options = fast
