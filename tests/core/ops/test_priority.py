"""A priority may depend on the call: on the record, the device and the direction."""

import dataclasses

import jax
import jax.numpy as jnp
import toy

import ejkernel
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import choose

CPU = DeviceInfo(platform="cpu", kind="cpu")


def by_length(record, device, direction):
    assert (device, direction) == (CPU, "forward")
    return 5 if record.x.shape[0] >= 8 else -5


def order(op, length):
    record = op.lower(toy.ToyArguments(x=jax.ShapeDtypeStruct((length,), jnp.float32)))
    return {v.implementation.name: v.priority for v in choose(op, record, CPU, "auto", "forward").verdicts}


def test_priority_functions_order_implementations_per_call(use):
    plain, long = toy.implementation("plain"), toy.implementation("long", priority=by_length)
    use(toy.plugin(plain, long))
    op = ejkernel.ops.registry().op("toy")
    assert list(order(op, 8).items()) == [("long", 5), ("plain", 0)]
    assert list(order(op, 4).items()) == [("plain", 0), ("long", -5)]


def test_priority_functions_are_not_called_for_calls_that_kernels_refuse(use):
    def never(record, device, direction):
        raise AssertionError("asked")

    made = toy.implementation("made", priority=never)
    requires = dataclasses.replace(made.requires, extra=lambda record: ["too long"])
    use(toy.plugin(toy.implementation("plain"), dataclasses.replace(made, requires=requires)))
    assert order(ejkernel.ops.registry().op("toy"), 8) == {"plain": 0, "made": None}
