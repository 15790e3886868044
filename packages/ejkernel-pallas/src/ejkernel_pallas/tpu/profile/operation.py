"""The workload of a call of an operation, dispatched as on a TPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.plugins import registry
from ejkernel_pallas.tpu.profile.cases import Case, Workload


def make_profile_case(
    label: str, op: str, record: Any, platform: str | None, gradient: bool, flops: float | None
) -> Case:
    """Returns the case of a call of an operation for a worker process.

    Args:
        label: The name of the case.
        op: Name of the operation.
        record: Its argument record, with data. Floating arrays are replaced by their shapes; the values of others may
            decide what the kernel does, and are kept.
        platform: Toolchain that the call requires.
        gradient: Whether to compute the gradients of all floating arrays, too.
        flops: The number of useful operations of the call.
    """
    kept = jax.tree.map(_shape_or_values, record)
    kwargs = {"op": op, "record": kept, "platform": platform, "gradient": gradient, "flops": flops}
    return Case(label=label, build=f"{__name__}:workload", kwargs=kwargs)


def workload(op: str, record: Any, platform: str | None, gradient: bool, flops: float | None) -> Workload:
    """Builds the workload."""
    declared = registry().op(op)
    parameters = declared.signature.parameters.values()
    unnamed = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]

    def call(arguments: Any) -> Any:
        inputs = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
        positional = [inputs.pop(name) for name in unnamed]
        return declared.function(*positional, **inputs, platform=platform)

    def call_and_gradient(arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        places = [k for k, leaf in enumerate(leaves) if _is_floating(leaf)]

        def call_on_floating_leaves(*arrays: Any) -> Any:
            replaced = dict(zip(places, arrays, strict=True))
            return call(jax.tree.unflatten(structure, [replaced.get(k, leaf) for k, leaf in enumerate(leaves)]))

        output, pull = jax.vjp(call_on_floating_leaves, *(leaves[k] for k in places))
        return output, pull(jax.tree.map(jnp.ones_like, output))

    return Workload(function=call_and_gradient if gradient else call, args=(record,), flops=flops)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _shape_or_values(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if _is_floating(leaf) else np.asarray(leaf)
