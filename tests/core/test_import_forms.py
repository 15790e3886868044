"""`ejkernel.modules.operations` gives functions, classes and configurations, whichever module was imported first."""

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest

from ejkernel import modules
from ejkernel.modules import operations
from ejkernel.ops.model import CALL_OPTIONS

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
    "assert ejkernel.modules.operations.flash_attention is ejkernel.modules.flash_attention;"
    "assert ejkernel.modules.operations.FlashAttention is Again"
)
PUBLIC = (
    "from ejkernel.modules import flash_attention as public;"
    "import types; assert isinstance(public, types.FunctionType);"
    f"assert public({CALL}, {CALL}, {CALL}).shape == (1, 4, 2, 8)"
)


@pytest.mark.parametrize(
    "order",
    [(FUNCTIONS, USE, SEED, PUBLIC), (SEED, FUNCTIONS, USE, PUBLIC), (PUBLIC, SEED, FUNCTIONS, USE)],
    ids=["functions first", "module first", "public first"],
)
def test_both_forms_work_in_a_fresh_process_in_either_order(order):
    script = "; ".join(("import jax", *order))
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_name_of_an_operation_is_its_function_and_no_module_is_callable():
    for name in operations.EXPORTS:
        module = importlib.import_module(f"ejkernel.modules.operations.{name}")
        assert not callable(module)
        assert inspect.isfunction(getattr(operations, name))
        assert getattr(operations, name) is getattr(modules, name) is getattr(module, name)


def test_the_body_of_a_public_function_calls_the_engine():
    """One step from the function to the engine: no generated source, and no wrapper except for earlier names."""
    for op in operations.OPS:
        source = inspect.getsource(op.function)
        before, definition, _ = source.partition(f"@document_options\ndef {op.function.__name__}(")
        assert definition
        assert before == "" or before.startswith("@accept_older_names(")
        assert source.endswith("    return run_operation(OP, locals())\n")
        written_in = inspect.unwrap(op.function).__code__.co_filename
        assert written_in == importlib.import_module(op.function.__module__).__file__


def test_an_argument_is_stated_once_in_the_signature():
    """The fields of a record are those of the signature: their names, order, defaults and what holds arrays."""
    for op in operations.OPS:
        stated = [p for name, p in inspect.signature(op.function).parameters.items() if name not in CALL_OPTIONS]
        fields = dataclasses.fields(op.arguments)
        assert [field.name for field in fields] == [parameter.name for parameter in stated]
        for field, parameter in zip(fields, stated, strict=True):
            # What may be None, but has no default for callers, can be left out of a record.
            default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
            assert field.default in (default, None)


@pytest.mark.parametrize("name", modules.__all__)
def test_every_public_name_is_there(name):
    assert getattr(operations, name) is getattr(modules, name)
    assert name in dir(operations)
