"""A backend's ring attention, registered from its tiled attention: what a ring needs is what its steps need."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.families.ring_attention import FAMILY, RingAttention
from ejkernel.families.ring_attention.steps import abstract_steps
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation, Requires
from ejkernel.ops.params import Direction
from ejkernel.ops.space import ConfigSpace
from ejkernel.types.arguments import non_default_fields


def ring_implementation(tiled_implementation: Implementation, *, forward: str, backward: str) -> Implementation:
    """Returns the implementation of ring attention whose steps are calls of a tiled attention.

    It serves what the tiled one serves of every step: an argument that a step has and the kernel does not honour, such
    as the positions of a causal ring with unequal parts, refuses the call by name.

    Args:
        tiled_implementation: The backend's implementation of the family `tiled_attention`.
        forward: `"module:function"` that calls `ring_loop.forward` with its kernels.
        backward: `"module:function"` that calls `ring_loop.backward`.
    """
    needs = tiled_implementation.backward_requires

    def priority(record: RingAttention, device: DeviceInfo, direction: Direction) -> int:
        return min(tiled_implementation.priority_for(step, device, direction) for step in abstract_steps(record))

    return dataclasses.replace(
        tiled_implementation,
        family=FAMILY.name,
        forward=forward,
        backward=backward,
        gradients=tiled_implementation.gradients & set(FAMILY.differentiable),
        requires=_ring_requirements(tiled_implementation.requires),
        backward_requires=None if needs is None else _ring_requirements(needs),
        config=_config_space_of_remote_step(tiled_implementation.config),
        # The order in which steps are merged depends on where in the ring a device stands.
        invariant_to=frozenset(),
        invariance_limits=lambda record: (),  # those of the tiled one are about its records
        invariant_priority=None,
        priority=priority if callable(tiled_implementation.priority) else tiled_implementation.priority,
        priority_reason=None,  # it is about the tiled one's records
        forward_mode=None,  # it is that of a call without a ring
    )


def _ring_requirements(tiled: Requires) -> Requires:
    def extra(record: RingAttention) -> Iterator[str]:
        yield from dict.fromkeys(_step_refusals(record, tiled))

    fields = {field.name for field in dataclasses.fields(RingAttention)} | {"lse_cotangent"}
    return dataclasses.replace(tiled, handles=tiled.handles & fields, extra=extra)


def _step_refusals(record: RingAttention, tiled: Requires) -> Iterator[str]:
    present = non_default_fields(record)
    for step in abstract_steps(record):
        for name in non_default_fields(step):
            if name not in tiled.handles and name not in present:  # fields that the call sets are refused elsewhere
                yield f"{name} is not handled, which the steps of this ring need"
        yield from tiled.extra(step)


def _config_space_of_remote_step(tiled: ConfigSpace) -> ConfigSpace:
    """Returns the configurations of the most frequent step: with another device's keys."""

    def heuristic(record: RingAttention, device: DeviceInfo, direction: Direction) -> Any:
        return tiled.heuristic(abstract_steps(record)[-1], device, direction)

    def candidates(record: RingAttention, device: DeviceInfo, direction: Direction) -> tuple[Any, ...]:
        return tiled.candidates(abstract_steps(record)[-1], device, direction)

    no_kind = {field.name: field.default for field in dataclasses.fields(ConfigSpace)}["kind"]
    return dataclasses.replace(tiled, heuristic=heuristic, candidates=candidates, kind=no_kind)
