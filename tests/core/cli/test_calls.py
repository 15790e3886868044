"""Describing a call on a command line."""

import dataclasses

import click
import jax
import jax.numpy as jnp
import pytest

from ejkernel.cli.calls import CallOptions, ShapeOption, parse_literal, parse_shape
from ejkernel.cli.signatures import accepted_array_dtypes, literal_arguments, required_arrays
from ejkernel.ops import registry
from ejkernel.types.arguments import array_fields

FLASH = registry().op("flash_attention")


def spec(op=FLASH, shapes=(), options=(), cases=(), **changes) -> CallOptions:
    base = {"kv_shape": None, "value_dim": None, "dtype": None, "platform": None, **changes}
    return CallOptions(
        op=op, shapes=tuple(map(parse_shape, shapes)), options=tuple(options), cases=tuple(cases), **base
    )


def assert_same_call(got, wanted) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(got)] == [(x.shape, x.dtype) for x in jax.tree.leaves(wanted)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1,128,8,64", ShapeOption(None, (1, 128, 8, 64), None)),
        ("query=1,2", ShapeOption("query", (1, 2), None)),
        ("query = 1, 2:bfloat16", ShapeOption("query", (1, 2), "bfloat16")),
        ("count=:int32", ShapeOption("count", (), "int32")),
        ("7:int32", ShapeOption(None, (7,), "int32")),
    ],
)
def test_shapes_are_read(text, wanted):
    assert parse_shape(text) == wanted


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "-1,2", "=1,2", "1,2:floaty", "1.5"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(click.BadParameter):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("none", None),
        ("128", 128),
        ("0.5", 0.5),
        ("(127, 0)", (127, 0)),
        ("127,None", (127, None)),
        ("highest", "highest"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_option_values_are_python_literals_or_plain_text(text, value):
    assert parse_literal(text) == value


def test_the_signature_says_what_is_an_array_and_what_an_option():
    assert required_arrays(FLASH) == ["query", "key", "value"]
    assert {"bias", "softmax_aux", "cum_seqlens_q"} <= set(accepted_array_dtypes(FLASH))
    assert "int32" in accepted_array_dtypes(FLASH)["cum_seqlens_q"]
    assert {"causal", "sliding_window", "precision", "dropout_seed"} <= set(literal_arguments(FLASH))
    assert not {"query", "mask_info", "platform", "cfg", "mesh"} & set(literal_arguments(FLASH))


def test_one_bare_shape_is_query_key_and_value():
    args = spec(shapes=["1,128,8,64"]).one().abstract_args
    assert args.query.shape == args.key.shape == args.value.shape == (1, 128, 8, 64)


def test_several_bare_shapes_are_the_required_arrays_in_order():
    args = spec(shapes=["1,16,4,8", "1,32,2,8", "1,32,2,24"]).one().abstract_args
    assert [args.query.shape, args.key.shape, args.value.shape] == [(1, 16, 4, 8), (1, 32, 2, 8), (1, 32, 2, 24)]


def test_shortcuts_for_keys_and_values():
    kv_shape = parse_shape("1,32,2,8")
    args = spec(shapes=["1,16,4,8"], kv_shape=kv_shape, value_dim=24, dtype="bfloat16").one().abstract_args
    assert args.key.shape == (1, 32, 2, 8)
    assert args.value.shape == (1, 32, 2, 24)
    assert args.query.dtype == args.value.dtype == jnp.bfloat16


def test_arrays_have_the_dtype_that_is_given_or_else_fits_the_argument():
    shapes = ["1,16,4,8:float16", "bias=1,4,16,16", "cum_seqlens_q=3"]
    args = spec(shapes=shapes, dtype="bfloat16").one().abstract_args
    assert [args.query.dtype, args.bias.dtype, args.cum_seqlens_q.dtype] == [jnp.float16, jnp.bfloat16, jnp.int32]


def test_options_become_canonical_arguments():
    args = (
        spec(shapes=["1,16,4,8"], options=["causal=true", "sliding_window = 3", "dropout_seed=7"]).one().abstract_args
    )
    assert args.causal is True
    assert args.sliding_window == (3, 3)
    assert args.dropout_seed is not None


def test_a_call_can_make_the_inputs_it_describes():
    call = spec(shapes=["1,16,4,8", "cum_seqlens_q=3"], dtype="bfloat16").one()
    made = call.make_args(jax.random.key(0))
    assert_same_call(made, call.abstract_args)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize("name", sorted(registry().ops))
def test_every_operation_can_be_called_from_the_command_line(name):
    """The first case of every operation, typed with --shape and -o, is the same call."""
    op = registry().op(name)
    wanted = jax.eval_shape(op.cases[0].make, jax.random.key(0))
    arrays, plain = array_fields(wanted), literal_arguments(op)
    shapes = [
        f"{n}={','.join(map(str, x.shape))}:{x.dtype.name}" for n, x in arrays.items() if n in accepted_array_dtypes(op)
    ]
    given = {f.name: getattr(wanted, f.name) for f in dataclasses.fields(wanted) if f.metadata.get("static")}
    options = [f"{n}={v}" for n, v in given.items() if n in plain and isinstance(v, bool | int | float | str | tuple)]
    args = spec(op, shapes, options).one().abstract_args
    assert_same_call(args, wanted)
