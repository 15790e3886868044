"""Limits and priorities of implementations answer for every valid call: an error would fail other kernels, too.

Dispatch asks every implementation about every call. So each is asked here about cases that are drawn for each
operation, with their floating arrays in each dtype that the operation accepts, and lowered as a call lowers them.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.device import find_device, target_device
from ejkernel.ops.dispatch import choose
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import array_fields
from ejkernel_conformance.subjects import abstract_args

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
DEVICES = ("h200", "v5e", "cpu")
CASES_PER_OPERATION = 2
OPS = registry().ops


def with_dtype(args, dtype):
    """The arguments with their floating arrays in another dtype."""

    def converted(x):
        return jax.ShapeDtypeStruct(x.shape, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return dataclasses.replace(args, **jax.tree.map(converted, array_fields(args)))


def lowered(op, args):
    """The operation that runs a call, and the record that dispatch asks about; None if the call is refused before."""
    try:
        jax.eval_shape(op.validate, args)
    except ValueError:
        return None
    op, args, _ = op.routed_call(args, {})
    try:
        return op, jax.eval_shape(op.lower, args)
    except jax.dtypes.TypePromotionError:  # of 8-bit floats
        return None


def ask_every_implementation(op, record, device):
    """Asks dispatch about both passes of a record in a `batch_invariant` block, and about its tangents."""
    registered = registry().implementations[op.name]
    fields = frozenset(op.family.differentiable) & set(array_fields(record))
    for direction, grad_fields in (("forward", frozenset()), ("backward", fields)):
        choice = choose(op, record, device, "auto", direction, grad_fields, None, batch_invariant=True)
        assert len(choice.verdicts) == len(registered)
    for implementation in registered:
        if implementation.forward_mode is not None:
            assert all(isinstance(reason, str) for reason in implementation.forward_mode_limits(record, fields))


@pytest.mark.parametrize("name", sorted(OPS))
def test_limits_and_priorities_never_raise(name):
    op, draw = OPS[name], random.Random(name)
    for case in draw.sample(op.cases, min(CASES_PER_OPERATION, len(op.cases))):
        for dtype in map(jnp.dtype, DTYPES):
            device = find_device(draw.choice(DEVICES))
            with target_device(device), jax.enable_x64(dtype == jnp.float64):
                if (call := lowered(op, with_dtype(abstract_args(case), dtype))) is not None:
                    ask_every_implementation(*call, device)
