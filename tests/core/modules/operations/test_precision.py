"""How exact matrix products are asked to be: a CPU would not show the difference, programs do."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ejkernel.modules import flash_attention, grouped_matmul, state_space_v2
from ejkernel.ops.grad import differentiable_call
from ejkernel.ops.model import Case, Op
from ejkernel.ops.plugins import registry
from ejkernel_conformance.running import call, with_gradients
from ejkernel_conformance.subjects import abstract_record, differentiable_fields, pinned_plan

HIGHEST, HIGH, DEFAULT = lax.Precision.HIGHEST, lax.Precision.HIGH, lax.Precision.DEFAULT
KEY = jax.random.key(0)


def products(function: Any, *args: Any) -> set[lax.Precision | None]:
    """The precisions of the matrix products of floating numbers that a function takes."""
    return set(_products(jax.make_jaxpr(function)(*args).jaxpr))


def _products(jaxpr: Any) -> Iterator[lax.Precision | None]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
            asked = equation.params["precision"]
            assert asked is None or asked[0] == asked[1]
            yield asked and asked[0]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _products(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def fullest(op: Op) -> Case:
    """The float32 case that exercises most."""
    cases = [case for case in op.cases if "ci" in case.tags and _dtype(op, case) == jnp.float32]
    return max(cases, key=lambda case: len(case.exercises - {"precision"}))


def _dtype(op: Op, case: Case) -> Any:
    return op.family.dtype(abstract_record(op, case))


def of_passes(op: Op, case: Case) -> set[lax.Precision | None]:
    """What XLA's forward and backward pass ask for, and what lies around them."""
    plan = pinned_plan(op, next(i for i in registry().implementations[op.name] if i.name == "xla"))
    record = abstract_record(op, case)
    asked = products(functools.partial(call, plan), jax.eval_shape(case.make, KEY))
    names = tuple(sorted(differentiable_fields(op.family, record)))
    if (
        any(v.status == "chosen" for v in plan.choose_implementation(record, "backward", frozenset(names)).verdicts)
        and names
    ):
        run = functools.partial(differentiable_call, plan)
        asked |= products(with_gradients(run, names), record, jax.eval_shape(run, record))
    return asked


# The last is the record of the operation without `_v2`, with a case in 16 bits alone; the others have no products.
OTHERS = {
    "causal_conv1d",
    "expert_routing",
    "fused_kl_divergence",
    "gather_reduce",
    "mean_pooling",
    "multi_latent_ragged_page_attention_v2",
    "rwkv4",
}


@pytest.mark.whole
@pytest.mark.parametrize("name", sorted(set(registry().ops) - OTHERS))
def test_float32_keeps_its_digits_unless_the_caller_lowers_them(name):
    op = registry().ops[name]
    case = fullest(op)
    assert of_passes(op, case) == {HIGHEST}
    with jax.default_matmul_precision("bfloat16"):
        # What is not worth rounding may stay as it is.
        assert DEFAULT in of_passes(op, case) <= {DEFAULT, HIGHEST}
        reference = products(op.reference, jax.eval_shape(case.make, KEY))
    assert reference == {HIGHEST}, "the reference knows no lower precision"


def attend(x: jax.Array, precision: Any = None) -> jax.Array:
    return flash_attention(x, x, x, precision=precision, platform="xla")


def multiply(x: jax.Array, precision: Any = None) -> jax.Array:
    sizes = jnp.array([3, 5])
    return grouped_matmul(x[0, :, 0], x[0, :2, :, :], sizes, precision=precision, platform="xla")


def read(x: jax.Array, precision: Any = None) -> jax.Array:
    per_head = x[0, 0, :, 0]
    return state_space_v2(
        x, per_head, x[:, :, :2], x[:, :, :2], per_head, x[..., 0], precision=precision, platform="xla"
    )[0]


@pytest.mark.parametrize("function", [attend, multiply, read])
def test_an_explicit_precision_is_honoured(function):
    x = jax.ShapeDtypeStruct((1, 8, 4, 4), jnp.float32)

    def both(x: jax.Array, precision: Any) -> Any:
        return jax.value_and_grad(lambda x: function(x, precision).sum())(x)

    for spelt, meant in ((None, HIGHEST), ("default", DEFAULT), (DEFAULT, DEFAULT), ("HIGH", HIGH), (HIGHEST, HIGHEST)):
        assert meant in products(functools.partial(both, precision=spelt), x) <= {meant, HIGHEST}
    with jax.default_matmul_precision("bfloat16"):  # and is not lowered by what holds elsewhere
        assert products(functools.partial(both, precision="high"), x) <= {HIGH, HIGHEST}


def test_products_of_16_bit_arrays_ask_for_no_precision():
    x = jax.ShapeDtypeStruct((1, 8, 4, 4), jnp.bfloat16)
    for function in (attend, multiply, read):
        assert DEFAULT in products(function, x)


def test_coarse_logits_are_rounded_by_an_operation_that_compilers_keep():
    x = jax.ShapeDtypeStruct((1, 8, 4, 4), jnp.float32)
    coarse = functools.partial(flash_attention, logits_dtype=jnp.bfloat16, platform="xla")
    assert "reduce_precision" in str(jax.make_jaxpr(coarse)(x, x, x))
