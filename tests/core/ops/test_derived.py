"""What an operation's declaration need not say, since it follows from the public function's signature."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from jaxtyping import Array, Float, Integer

from ejkernel.modules import operations
from ejkernel.ops import ArgumentRecord, Case, Op
from ejkernel.ops.argument_records import holds_arrays
from ejkernel.ops.derived import axes_of, cases_of_uncovered_arrays, config_class_from_annotation, normal_inputs


def public(
    x: Float[Array, "b #t"],
    lengths: Integer[Array, " n+1"] | None = None,
    *,
    scale: float = 1.0,
    cfg: toy.ToyConfig | None = None,
):
    """A public function."""


class PublicArguments(ArgumentRecord, of=public):
    """Its arguments."""


def test_derived_argument_record_has_the_fields_of_the_signature():
    record = PublicArguments(x=jnp.ones((2, 3)))
    assert [field.name for field in dataclasses.fields(record)] == ["x", "lengths", "scale"]
    leaves, tree = jax.tree.flatten(record)
    assert len(leaves) == 1
    assert tree != jax.tree.structure(PublicArguments(x=jnp.ones((2, 3)), scale=2.0))
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'x'"):
        PublicArguments()


def test_arguments_with_arrays_are_pytree_children_of_the_record():
    assert holds_arrays(dict[str, Float[Array, "b"]] | None)
    assert not holds_arrays(type(public))
    assert not holds_arrays(float | None)


def test_op_axes_default_to_the_shape_annotations():
    assert axes_of(public, {"lengths": "n"}) == {"x": "b t", "lengths": "n"}
    assert list(axes_of(public, {"lengths": "n", "x": "t b"}).items()) == [("x", "t b"), ("lengths", "n")]
    with pytest.raises(ValueError, match=r"axes: lengths of public is annotated 'n\+1', wants letters"):
        axes_of(public, {})


def test_config_class_comes_from_the_cfg_annotation():
    assert config_class_from_annotation(public) is toy.ToyConfig


def test_normal_inputs_refuse_integer_arrays():
    shapes = PublicArguments(x=jax.ShapeDtypeStruct((2, 3), "bfloat16"))
    assert normal_inputs(shapes, jax.random.key(0)).x.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="PublicArguments has integers; give the operation a make_inputs"):
        normal_inputs(PublicArguments(x=jax.ShapeDtypeStruct((2,), "int32")), jax.random.key(0))


def biased(
    x: Float[Array, "b t h"],
    bias: Float[Array, "#b t"] | Integer[Array, "t"] | None = None,
    ids: Integer[Array, "b t"] | None = None,
    table: Float[Array, "n h"] | None = None,
    *,
    cfg: toy.ToyConfig | None = None,
):
    """Takes one array, and three optional ones."""


class BiasedArguments(ArgumentRecord, of=biased):
    """Its record."""


def test_optional_float_arrays_without_a_case_get_one():
    def make(key):
        return BiasedArguments(x=jax.random.normal(key, (2, 3, 4)))

    fields = ("bias", "ids", "table", "other")
    cases = (Case(name="packed", make=make, exercises=frozenset({"ids"})), Case(name="plain", make=make))
    (case,) = cases_of_uncovered_arrays(biased, fields, cases)
    record = case.make(jax.random.key(0))
    assert (case.name, case.exercises, case.tags) == ("bias alone", {"bias"}, {"ci"})
    assert (record.x.shape, record.bias.shape, record.ids, record.table) == ((2, 3, 4), (2, 3), None, None)
    assert not cases_of_uncovered_arrays(biased, fields, (*cases, case))
    assert not cases_of_uncovered_arrays(biased, fields, cases[:1])


def test_op_name_function_and_config_are_derived_from_its_arguments():
    op = Op(
        arguments=PublicArguments, family=toy.FAMILY, validate=print, lower=lambda args: args, cases=(),
        axes={"lengths": "n"},
    )  # fmt: skip
    assert (op.name, op.function, op.config) == ("public", public, toy.ToyConfig)
    assert dataclasses.replace(op, name="other").axes == op.axes
    with pytest.raises(ValueError, match="function: got none, and Toy"):
        dataclasses.replace(op, arguments=toy.Toy, function=Op.__dataclass_fields__["function"].default)


def test_op_reference_defaults_to_that_of_its_family():
    op = next(op for op in operations.OPS if op.name == "mean_pooling")
    args = op.cases[0].make(jax.random.key(0))
    want = op.finish(args, op.family.reference(op.lower(args))[0])
    jax.tree.map(lambda x, y: (x == y).all() or pytest.fail("differs"), op.reference(args), want)
