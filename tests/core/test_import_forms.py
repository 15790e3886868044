"""`ejkernel.modules.operations` gives functions, classes and configurations, and its modules stay modules."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel.modules import operations

CALL = "jax.numpy.ones((1, 4, 2, 8))"
FUNCTIONS = (
    "from ejkernel.modules.operations import FlashAttention, FlashAttentionConfig, flash_attention, gla_attention"
)
USE = (
    f"x = {CALL}; y = flash_attention(x, x, x, causal=True); assert y.shape == x.shape;"
    "assert gla_attention(x, x, x).shape == x.shape; assert FlashAttentionConfig() == FlashAttentionConfig();"
    "assert FlashAttention().run(x, x, x).shape == x.shape"
)
SEED = (
    "import ejkernel.modules.operations.flash_attention;"
    "from ejkernel.modules.operations.flash_attention import FlashAttention as Again;"
    "whole = ejkernel.modules.operations.flash_attention;"
    "assert whole.FlashAttention is Again; assert callable(whole.validate)"
)
PUBLIC = (
    "from ejkernel.modules import flash_attention as public;"
    "import types; assert isinstance(public, types.FunctionType);"
    f"assert public({CALL}, {CALL}, {CALL}).shape == (1, 4, 2, 8)"
)


@pytest.mark.parametrize(
    "order",
    [(FUNCTIONS, USE), (FUNCTIONS, USE, SEED, PUBLIC), (SEED, FUNCTIONS, USE, PUBLIC), (PUBLIC, SEED, FUNCTIONS, USE)],
    ids=["functions", "functions first", "module first", "public first"],
)
def test_both_forms_work_in_a_fresh_process_in_either_order(order):
    script = "; ".join(("import jax", *order))
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", operations.EXPORTS)
def test_the_module_of_an_operation_is_called_as_its_function(name):
    module, function = getattr(operations, name), getattr(modules, name)
    assert callable(module)
    assert inspect.ismodule(module)
    assert inspect.signature(module) == inspect.signature(function)
    assert module.op is module.OP


def test_a_module_goes_where_functions_go():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    module = operations.flash_attention
    want = modules.flash_attention(x, x, x, causal=True)
    np.testing.assert_allclose(jax.jit(module, static_argnames="causal")(x, x, x, causal=True), want, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(module)(x[None], x[None], x[None])[0], modules.flash_attention(x, x, x), rtol=1e-6
    )
    assert jnp.isfinite(jax.grad(lambda q: module(q, x, x).sum())(x)).all()
    assert str(ejkernel.explain(module, x, x, x)) == str(ejkernel.explain(modules.flash_attention, x, x, x))


@pytest.mark.parametrize("name", sorted(set(modules.__all__) - set(operations.EXPORTS)))
def test_every_public_name_is_there(name):
    assert getattr(operations, name) is getattr(modules, name)
    assert name in dir(operations)
