"""Arrays of more than 2^31 elements in XLA: what indexes an array by 32 bits indexes no axis that needs more."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel import modules

T, H, D = 2**15 + 7, 2048, 64
ROWS = jax.ShapeDtypeStruct((1, T, H, D), jnp.bfloat16)
GATES = jax.ShapeDtypeStruct((1, T, H), jnp.bfloat16)
INT = jnp.int32


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(function):
    def loss(*arrays):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(*arrays)))

    return jax.grad(loss)


PAGES = shaped(2**17, 64, 8, 128)
CALLS = {
    "flash_attention": (gradient(lambda *x: modules.flash_attention(*x, causal=True, platform="xla")), (ROWS,) * 3),
    "gla_attention": (gradient(lambda *x: modules.gla_attention(*x, platform="xla")), (ROWS,) * 4),
    "gated_delta_rule": (
        gradient(lambda *x: modules.gated_delta_rule(*x, platform="xla")),
        (*(ROWS,) * 3, GATES, GATES),
    ),
    "grouped_matmul": (
        gradient(lambda lhs, rhs, sizes: modules.grouped_matmul(lhs, rhs, sizes, platform="xla")),
        (shaped(2**19 + 3, 4200), shaped(130, 4200, 4096), shaped(130, dtype=INT)),
    ),
    "unified_attention": (
        lambda *x: modules.unified_attention(*x, platform="xla"),
        (shaped(64, 8, 128), PAGES, PAGES, shaped(64, dtype=INT), shaped(64, 512, dtype=INT), shaped(65, dtype=INT)),
    ),
    "page_attention": (
        lambda *x: modules.page_attention(*x, platform="xla", kv_layout="pshd"),
        (shaped(64, 8, 128), PAGES, PAGES, shaped(64, dtype=INT), shaped(64, 512, dtype=INT)),
    ),
}
INDEXED = re.compile(r"stablehlo\.(dynamic_slice|dynamic_update_slice|gather|scatter|iota)")


@pytest.mark.parametrize("name", CALLS)
def test_no_axis_is_longer_than_its_index(name):
    function, arrays = CALLS[name]
    text = jax.jit(function).trace(*arrays).lower().as_text()
    indexed = [line for line in text.splitlines() if INDEXED.search(line)]
    shapes = [x.split("x") for line in indexed for x in re.findall(r"tensor<([0-9x]+)x", line)]
    assert max(int(size) for shape in shapes for size in shape) < 2**31
    assert max(math.prod(map(int, shape)) for shape in shapes) > 2**31
