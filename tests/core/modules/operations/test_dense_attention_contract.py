"""The public signatures of the dense attention operations, their records and their annotations say the same."""

import dataclasses
import inspect
import typing

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from ejkernel.modules import attention, blocksparse_attention, scaled_dot_product_attention
from ejkernel.modules.operations import configs
from ejkernel.modules.operations.attention import OP as WEIGHTS
from ejkernel.modules.operations.blocksparse_attention import OP as BLOCKSPARSE
from ejkernel.modules.operations.scaled_dot_product_attention import OP as SCALED
from ejkernel.ops.model import CALL_OPTIONS
from ejkernel.types.sparse_masks import CausalMask

OPS = {op.name: op for op in (WEIGHTS, BLOCKSPARSE, SCALED)}
QUERY, KEY, VALUE = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 6, 2, 16)), jnp.ones((2, 6, 2, 12))
HEADS_FIRST = tuple(x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE))


@pytest.mark.parametrize("name", OPS)
def test_record_mirrors_the_function(name):
    op = OPS[name]
    parameters = [p for n, p in op.signature.parameters.items() if n not in CALL_OPTIONS]
    fields = dataclasses.fields(op.arguments)
    assert [p.name for p in parameters] == [f.name for f in fields]
    for parameter, field in zip(parameters, fields, strict=True):
        required = field.default is dataclasses.MISSING
        assert (parameter.default is inspect.Parameter.empty) == required
        assert required or field.default is parameter.default
    assert [n for n in op.signature.parameters if n in CALL_OPTIONS] == list(CALL_OPTIONS)


def test_positional_arguments_are_the_promised_ones():
    promised = {
        "attention": "query key value bias dropout_rng softmax_aux",
        "blocksparse_attention": "query key value softmax_aux bias",
        "scaled_dot_product_attention": "query key value bias cum_seqlens_q cum_seqlens_k",
    }
    for name, op in OPS.items():
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found = [n for n, p in op.signature.parameters.items() if p.kind is kind]
        assert found == promised[name].split() == list(op.axes)
        assert getattr(configs, op.config.__name__) is op.config


@pytest.mark.parametrize("name", OPS)
def test_every_argument_is_documented_once_and_annotated(name):
    documented = inspect.getdoc(OPS[name].function) or ""
    hints = typing.get_type_hints(OPS[name].function)
    for argument in OPS[name].signature.parameters:
        assert documented.count(f"\n    {argument}: ") == 1, argument
        assert argument in hints


def checked(function):
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        (attention, (QUERY, KEY, VALUE), {"dtype": jnp.bfloat16, "softmax_dtype": "float32"}),
        (attention, (QUERY, KEY, VALUE, jnp.ones((1, 2, 1, 6)), 3, jnp.ones((4, 2))), {"deterministic": False}),
        (attention, (QUERY, KEY, VALUE, None, jax.random.key(0)), {"init_bias": lambda: jnp.ones((1, 1, 8, 6))}),
        (attention, (QUERY, KEY, VALUE, None, jax.random.key_data(jax.random.key(0))), {"sliding_window": 2}),
        (scaled_dot_product_attention, (QUERY, KEY, VALUE, jnp.ones((1, 1, 8, 6))), {"causal": True}),
        (scaled_dot_product_attention, (QUERY, QUERY, QUERY, None, jnp.array([0, 8, 9])), {}),
        (blocksparse_attention, HEADS_FIRST, {"mask_builder": CausalMask((8, 6)), "chunk_size": 3}),
        (
            blocksparse_attention,
            HEADS_FIRST,
            {"attention_mask": jnp.ones((1, 4, 8, 6), int), "softmax_aux": jnp.ones(3)},
        ),
        (blocksparse_attention, HEADS_FIRST, {"mask_builder": lambda q, k, *_: CausalMask((q, k)), "causal": False}),
    ],
)
def test_annotations_admit_right_calls_and_describe_the_results(function, arguments, options):
    results = jax.eval_shape(lambda: checked(function)(*arguments, **options))
    shapes = jax.tree.map(lambda x: x.shape, results)
    width = arguments[2].shape[-1]
    if function is attention:
        assert shapes == ((2, 8, 4, width), (2, 4, 8, 6))
        assert {x.dtype for x in results} == {jnp.dtype(options.get("dtype", jnp.float32))}
    else:
        assert shapes == (*arguments[0].shape[:3], width)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (attention, (QUERY[0], KEY, VALUE)),
        (attention, (QUERY, KEY, VALUE, None, None, jnp.ones((3, 2)))),
        (scaled_dot_product_attention, (QUERY, KEY[..., :8], VALUE)),
        (scaled_dot_product_attention, (QUERY, KEY, VALUE, jnp.ones((2, 4, 8, 5)))),
        (blocksparse_attention, (HEADS_FIRST[0], KEY, HEADS_FIRST[2])),
        (blocksparse_attention, (*HEADS_FIRST, None, jnp.ones((2, 8, 4, 6)))),
    ],
)
def test_annotations_refuse_what_validation_refuses(function, arguments):
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(function)(*arguments)
    with pytest.raises(ValueError, match="got"):
        function(*arguments)
