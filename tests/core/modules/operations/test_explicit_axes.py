"""Operations on arrays whose types say how they are sharded, as under `jax.set_mesh` with explicit axes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformed import graded

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.modules.operations.flash_attention import OP, FlashAttentionArguments
from ejkernel.ops import ConfigSelectorChain, tuning
from ejkernel.ops.call import call
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.plugins import registry
from ejkernel.ops.sharding import axis_letters_of
from ejkernel_conformance.checks import public_arguments
from ejkernel_conformance.running import differentiable_inputs
from ejkernel_conformance.subjects import inputs

OPS = [op for op in registry().ops.values() if op.name != "ring_attention"]  # which is told of the devices it talks to
ROWS = PartitionSpec("rows")
needs_two_devices = pytest.mark.needs("2 devices")


def mesh():
    return jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])


def splits(op, args):
    """By argument, the spec that splits the batch, or else rows, heads or channels, if they are even."""
    letters = axis_letters_of(op, args)
    axes = letters.arguments
    shapes = {name: jnp.shape(getattr(args, name)) for name in axes if hasattr(getattr(args, name), "shape")}
    given = {name: axes[name].split() for name, shape in shapes.items() if len(shape) == len(axes[name].split())}
    for wanted in ("b",) if "b" in letters.shardable else ("r", "hg", "m"):
        sizes = {size for name in given for x, size in zip(given[name], shapes[name], strict=True) if x in wanted}
        if sizes and set(wanted) <= set(letters.shardable) and not any(size % 2 for size in sizes):
            break
    else:
        wanted = ""
    return {name: PartitionSpec(*("rows" if x in wanted else None for x in given[name])) for name in given}


@needs_two_devices
@pytest.mark.whole
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operation_and_its_gradients_follow_explicit_axes(op):
    """Traced alone; the devices' parts are compiled as those of a call with `mesh=`."""
    case = op.cases[0]
    args, where = inputs(case, 0), mesh()
    trained = any(i.backward for i in registry().implementations[op.name])
    given = splits(op, args)
    names = [name for name in differentiable_inputs(op, case) if name in given] if trained else []

    def of_arrays(*arrays):
        positional, keywords = public_arguments(op, dataclasses.replace(args, **dict(zip(given, arrays, strict=True))))
        return op.function(*positional, **keywords)

    run = graded(of_arrays, [list(given).index(name) for name in names]) if names else of_arrays
    arrays = [getattr(args, name) for name in given]
    with jax.set_mesh(where):
        results = jax.eval_shape(run, *map(functools.partial(typed, where), arrays, given.values()))
    output, *gradients = results if names else (results,)
    assert jax.tree.map(jnp.shape, output) == jax.tree.map(jnp.shape, jax.eval_shape(op.reference, args))
    assert ("rows" in jax.tree.leaves(output)[0].sharding.spec) == any("rows" in spec for spec in given.values())
    for name, gradient in zip(names, *gradients, strict=True) if names else ():
        assert (gradient.shape, gradient.sharding.spec) == (getattr(args, name).shape, given[name]), name


def typed(where, x, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(where, spec))


@needs_two_devices
def test_values_gradients_and_explanations_are_those_of_a_call_with_mesh():
    arrays, where = jax.random.normal(jax.random.key(0), (3, 2, 12, 4, 8)), mesh()
    sinks = jnp.ones((4, 1))

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, None, None, None, sinks, causal=True)

    run = jax.jit(graded(attend, (0, 1, 2, 3)))
    want = run(*arrays, sinks)
    with jax.set_mesh(where):
        placed = [jax.device_put(x, NamedSharding(where, ROWS)) for x in arrays]
        got = run(*placed, jax.device_put(sinks, NamedSharding(where, PartitionSpec())))
        output = flash_attention(*placed, causal=True)
        text = str(explain(flash_attention, *placed, causal=True))
    assert jax.typeof(output).sharding.spec[0] == "rows"
    assert "xla" in text
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


@needs_two_devices
def test_calls_with_explicit_axes_are_recorded_for_offline_tuning(monkeypatch):
    missed = []
    monkeypatch.setattr(tuning, "tune_missing", lambda plan, args: missed.append(plan.op.name))
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner())
    query, where = jnp.ones((2, 12, 4, 8)), mesh()
    call(OP, FlashAttentionArguments(query=query, key=query, value=query), chain=chain)
    with jax.set_mesh(where):
        placed = jax.device_put(query, NamedSharding(where, ROWS))
        call(OP, FlashAttentionArguments(query=placed, key=placed, value=placed), chain=chain)
    assert missed == ["flash_attention"]


@needs_two_devices
def test_explicit_axes_that_cannot_be_split_are_refused_with_a_reason():
    query, where = jnp.ones((2, 12, 4, 8)), mesh()
    with jax.set_mesh(where):
        keys = jax.device_put(query, NamedSharding(where, PartitionSpec(None, "rows")))
        with pytest.raises(ValueError, match=r"axis 's' of key cannot be split .*shardings in the arrays' types"):
            flash_attention(query, keys, keys)
