"""Every axis of every operation, set to 0: an empty or zero result and gradient, or an error that names an argument."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import operations
from ejkernel.ops import explain
from ejkernel.ops.call import call
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.subjects import abstract_args

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
PACKED = {"int4", "uint4", "uint32"}


@functools.cache
def arguments(op):
    return op.cases[0].make(jax.random.key(0))


def letters(op):
    """The axis letters of an operation's arrays, but those of starts, of which there is one more than of sequences."""
    named = op.letters(abstract_args(op.cases[0]))[0]
    return sorted({letter for axes in named.values() for letter in axes.split()} - {"n"})


def emptied(op, letter):
    """The arguments of a call with an axis of size 0; its integers are 0, so that they fit the rest."""
    args, changes = arguments(op), {}
    for name, axes in op.letters(args)[0].items():
        array, axes = getattr(args, name, None), axes.split()
        if not hasattr(array, "shape") or len(axes) != array.ndim:
            continue
        sizes = zip(axes, array.shape, strict=True)
        shape = tuple(0 if axis == letter else 1 if (letter, axis) == ("r", "n") else n for axis, n in sizes)
        counts = jnp.issubdtype(array.dtype, jnp.integer) and str(array.dtype) not in PACKED
        if shape != array.shape or counts:
            changes[name] = jnp.zeros(shape, array.dtype)
    return dataclasses.replace(args, **changes)


def floating(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


CALLS = [(op, letter) for op in operations.OPS for letter in letters(op)]


@pytest.mark.parametrize(("op", "letter"), CALLS, ids=lambda x: getattr(x, "name", x))
def test_an_empty_axis_gives_a_result_or_an_error_that_names_the_argument(op, letter):
    said = None
    try:
        args = emptied(op, letter)
        output = jax.jit(lambda args: call(op, args, platform="xla"))(args)
    except ValueError as error:
        said = str(error)
    if said is not None:
        name = re.match(r"(\w+)(\.\w+)?: ", said)
        assert name, said
        assert name[1] in op.signature.parameters
        return
    assert all(np.isfinite(x[x != -np.inf]).all() for x in floating(output))
    if not op.family.differentiable:
        return
    names = [name for name, x in array_fields(args).items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def total(fields):
        output = call(op, dataclasses.replace(args, **fields), platform="xla")
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0)) for x in floating(output))

    gradients = jax.jit(jax.grad(total))({name: getattr(args, name) for name in names})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    if all(x.size == 0 for x in floating(output)):
        assert not any(np.any(x) for x in jax.tree.leaves(gradients))


KNOWN = {
    "mla_decode": "b",
    "native_sparse_attention": "b",
    "page_attention": "k",
    "decode_attention": "k",
    "prefill_page_attention": "k",
    "unified_attention": "k",
    "ragged_page_attention_v2": "k",
    "ragged_page_attention_v3": "k",
    "multi_latent_ragged_page_attention": "x",
    "chunked_prefill_paged_decode": "r",
    "gather_reduce": "m",
}


@pytest.mark.parametrize("name", KNOWN)
def test_calls_without_batch_pages_or_rows_have_a_result(name):
    """No batch, no pages and no rows are calls that come up, and have a result; without pages it is zero."""
    op = next(op for op in operations.OPS if op.name == name)
    args = emptied(op, KNOWN[name])
    output, *_ = jax.tree.leaves(jax.jit(lambda args: call(op, args, platform="xla"))(args))
    assert output.shape[1:] == jax.tree.leaves(jax.eval_shape(functools.partial(call, op), arguments(op)))[0].shape[1:]
    assert not np.any(output)


def test_a_gather_of_no_columns_and_rows():
    op = next(op for op in operations.OPS if op.name == "gather_reduce")
    for letter in ("k", "m"):
        output = op.function(
            *(getattr(emptied(op, letter), name) for name in ("rows", "indices", "inverse", "weights"))
        )
        assert output.shape == (arguments(op).indices.shape[0], arguments(op).rows.shape[1])
        assert not np.any(output)


def test_kernels_refuse_an_empty_array_by_name():
    query, key = jnp.zeros((0, 64, 4, 64), jnp.bfloat16), jnp.zeros((0, 64, 2, 64), jnp.bfloat16)
    op = next(op for op in operations.OPS if op.name == "flash_attention")
    with target_device(H200):
        choice = explain(op.function, query, key, key).forward
    assert choice.implementation.name == "xla"
    assert "query is empty" in {r for v in choice.verdicts for r in v.reasons}
