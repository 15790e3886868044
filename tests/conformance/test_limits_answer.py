"""Limits and priorities of implementations answer for every valid call: an error would fail other kernels, too.

Dispatch asks every implementation about every call. So each is asked here about cases that are drawn for each
operation, with their floating arrays in each dtype that the operation accepts.
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
from ejkernel_conformance.subjects import abstract_args, abstract_record

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
DEVICES = ("h200", "v5e", "cpu")
CASES_PER_OPERATION = 2
OPS = registry().ops


def with_dtype(record, dtype):
    """The record, of arguments or of a family, with its floating arrays in another dtype."""

    def converted(x):
        return jax.ShapeDtypeStruct(x.shape, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return dataclasses.replace(record, **jax.tree.map(converted, array_fields(record)))


def accepts(op, case, dtype):
    """Whether the operation accepts the arguments of a case in another dtype."""
    try:
        jax.eval_shape(op.validate, with_dtype(abstract_args(case), dtype))
    except ValueError:
        return False
    return True


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
        record = abstract_record(op, case)
        for dtype in map(jnp.dtype, DTYPES):
            device = find_device(draw.choice(DEVICES))
            with target_device(device), jax.enable_x64(dtype == jnp.float64):
                if accepts(op, case, dtype):
                    ask_every_implementation(op, with_dtype(record, dtype), device)
