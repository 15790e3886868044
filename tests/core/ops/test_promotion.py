"""Every operation, forward and backward, under `jax_numpy_rank_promotion="raise"` and strict promotion of dtypes.

Both settings raise while a call is traced, so nothing is compiled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention, operations
from ejkernel.promotion import standard_promotion, with_standard_promotion
from ejkernel.quantization import dequantize, quantize
from ejkernel_conformance.running import is_floating, leaves_by_name, with_gradients
from ejkernel_conformance.subjects import abstract_args, abstract_record


def fullest_of_each_dtype(op):
    """The cases that exercise most arguments, one for each dtype."""
    found = {}
    for case in op.cases:
        if "ci" in case.tags:
            dtype = jnp.dtype(op.family.dtype(abstract_record(op, case))).name
            found[dtype] = max(found.get(dtype, case), case, key=lambda case: len(case.exercises))
    return list(found.values())


def public_call(op, args):
    """The public function with the arguments of a record."""
    return op.function(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})


def gradients(op, args, output, names):
    """The shapes of gradients of the named arguments."""
    return jax.eval_shape(with_gradients(lambda args: public_call(op, args), names), args, output)[1]


def differentiable_names(op, args, output):
    """Floating arguments that have a gradient: all, or those that are called as the record's fields are."""
    names = tuple(name for name, leaf in leaves_by_name(args).items() if is_floating(leaf))
    try:
        gradients(op, args, output, names)
    except NotImplementedError:
        return tuple(name for name in names if name in op.family.differentiable)
    return names


@pytest.mark.whole
@pytest.mark.parametrize("op", operations.OPS, ids=lambda op: op.name)
def test_shapes_of_results_and_gradients_ignore_the_callers_promotion_settings(op):
    for case in fullest_of_each_dtype(op):
        args = abstract_args(case)
        output = jax.eval_shape(lambda args: public_call(op, args), args)
        names = differentiable_names(op, args, output)
        expected = gradients(op, args, output, names) if names else {}
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            assert jax.eval_shape(lambda args: public_call(op, args), args) == output
            if names:
                assert gradients(op, args, output, names) == expected


def test_gradient_values_ignore_the_callers_promotion_settings():
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
    attend = jax.jit(lambda x: jnp.sum(flash_attention(x, x, x, causal=True)))
    expected = jax.grad(attend)(x)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jnp.array_equal(jax.grad(attend)(x), expected)


def test_quantize_works_under_strict_promotion():
    w = jnp.ones((64, 64))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for mode in ("affine", "mxfp4", "nvfp4"):
            assert dequantize(*quantize(w, mode=mode), mode=mode).shape == w.shape


def test_standard_promotion_restores_the_callers_promotion_settings():
    add = lambda: jnp.ones(3) + jnp.ones((2, 3))  # noqa: E731
    with jax.numpy_rank_promotion("raise"):
        assert with_standard_promotion(add)().shape == (2, 3)
        with standard_promotion():
            assert add().shape == (2, 3)
        with pytest.raises(ValueError, match="rank_promotion"):
            add()
    assert add().shape == (2, 3)
