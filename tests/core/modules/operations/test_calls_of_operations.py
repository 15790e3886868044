"""Public functions: every argument has a name, and what all operations share is written once."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention, operations
from ejkernel.ops import explain
from ejkernel.ops.model import CALL_OPTIONS
from ejkernel.ops.operation import CALL_OPTIONS_DOC, complete_docstring

EVERY = pytest.mark.parametrize("op", operations.OPS, ids=lambda op: op.name)
Q, K, V = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))


@EVERY
def test_every_argument_can_be_given_by_name(op):
    parameters = list(inspect.signature(op.function).parameters.values())
    assert {parameter.kind for parameter in parameters} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert tuple(parameter.name for parameter in parameters[-5:]) == CALL_OPTIONS


@EVERY
def test_an_argument_is_documented_once_and_call_options_in_one_text(op):
    text = inspect.getdoc(op.function)
    assert text is not None
    documented = [
        line[4:].split(":")[0]
        for line in text.split("Args:\n")[1].split("\n\n")[0].splitlines()
        if line[4:5].strip() and ":" in line
    ]
    assert documented == list(inspect.signature(op.function).parameters)
    assert CALL_OPTIONS_DOC.rstrip() in text


def test_names_and_positions_mean_the_same():
    bias = jnp.ones((1, 2, 16, 16))
    by_name = flash_attention(value=V, key=K, query=Q, bias=bias, softmax_aux=jnp.zeros(3))
    np.testing.assert_array_equal(by_name, flash_attention(Q, K, V, bias, None, None, jnp.zeros(3)))
    packed = flash_attention(query=Q, key=K, value=V, cum_seqlens_q=jnp.array([0, 5, 16]))
    np.testing.assert_array_equal(packed, flash_attention(Q, K, V, None, jnp.array([0, 5, 16])))


@EVERY
def test_a_call_that_does_not_fit_the_signature_is_a_type_error(op):
    # The cross-entropy takes logits, or hidden states and a matrix: none of its arguments is required by itself.
    wrong, message = (
        (ValueError, "logits: got") if op.name == "fused_cross_entropy" else (TypeError, r"missing \d+ required")
    )
    with pytest.raises(wrong, match=message):
        op.function()
    with pytest.raises(TypeError, match=rf"{op.function.__name__}\(\) got an unexpected keyword argument 'quarry'"):
        op.function(quarry=Q)


def test_explain_takes_arguments_by_name():
    assert str(explain(flash_attention, query=Q, key=K, value=V)) == str(explain(flash_attention, Q, K, V))


@pytest.mark.parametrize("text", ["No sections.", "One.\n\nArgs:\n    mesh: Again.\n\nReturns:\n    It.", None])
def test_a_docstring_without_a_place_for_the_options_is_refused(text):
    if text is None:  # python -OO
        assert complete_docstring(None) is None
        return
    with pytest.raises(ValueError, match="docstring"):
        complete_docstring(text)


@pytest.mark.parametrize("own", ["", "Raises:\n    TypeError: Its own.\n\n"])
def test_every_operation_documents_the_shared_errors_once(own):
    text = complete_docstring(f"One.\n\nArgs:\n    x: An array.\n\nReturns:\n    It.\n\n{own}Example:\n    Code.")
    assert text.count("\n\nRaises:\n    ValueError: ") == text.count("NoImplementationError") == 1
    assert ("    TypeError: Its own." in text) == bool(own)
    assert text.endswith("\n\nExample:\n    Code.")
