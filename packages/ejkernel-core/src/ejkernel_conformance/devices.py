"""How many tests of the suite would run on devices that are not here, in a line per device."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.dispatch import hardware_refusals
from ejkernel.ops.model import Implementation
from ejkernel.ops.params import Direction
from ejkernel.ops.plugins import registry
from ejkernel_conformance.claims import record_refusals
from ejkernel_conformance.served import Refused, refusal_of
from ejkernel_conformance.subjects import Subject, abstract_record, differentiable_fields

LOWEST_CAPABILITY = 8.0


def summary(tests: Iterable[tuple[Callable[..., None], Any]]) -> list[str]:
    """Returns, for each device that some implementation is made for and this machine lacks, which tests the suite runs
    there.

    Args:
        tests: Pairs of a test function and a parameter, those that are refused here included.

    Returns:
        Lines such as "CUDA, sm_90: 3,412 tests of 9 implementations, run where such a device is".
    """
    pairs = [(test, subject) for test, subject in tests if isinstance(subject, Subject)]
    lines: list[str] = []
    for label, device in _devices():
        if current_device().names & device.names:
            continue
        served = [subject for test, subject in pairs if _would_run(test, subject, device)]
        if not served:
            continue
        kernels = {(subject.implementation.family, subject.implementation.name) for subject in served}
        lines.append(f"{label}: {len(served):,} tests of {len(kernels)} implementations, run where such a device is")
    return lines


def _devices() -> Iterator[tuple[str, DeviceInfo]]:
    """Yields the devices that registered implementations are made for; NVIDIA's by the compute
    capabilities they need.
    """
    needs = [i.requires for implementations in registry().implementations.values() for i in implementations]
    words = frozenset[str]().union(*(requires.devices for requires in needs))
    capabilities = {requires.min_compute_capability or LOWEST_CAPABILITY for requires in needs}
    if words & {"gpu", "nvidia"}:
        for capability in sorted(capabilities):
            device = DeviceInfo(platform="gpu", vendor="nvidia", compute_capability=capability)
            yield f"CUDA, sm_{round(capability * 10)}", device
    if words & {"gpu", "amd"}:
        yield "ROCm", DeviceInfo(platform="gpu", vendor="amd")
    if "tpu" in words:
        yield "TPU", DeviceInfo(platform="tpu", vendor="google")


def _would_run(test: Callable[..., None], subject: Subject, device: DeviceInfo) -> bool:
    refusal = refusal_of(test)
    directions: tuple[Direction, ...] = refusal.directions if isinstance(refusal, Refused) else ("forward",)
    return all(_serves(subject, direction, device) for direction in directions)


@functools.cache
def _serves(subject: Subject, direction: Direction, device: DeviceInfo) -> bool:
    """Returns whether an implementation serves a direction on a device, were its toolchain there."""
    op, implementation = subject.op, subject.implementation
    if direction == "backward" and implementation.backward is None:
        return True  # another implementation's backward pass follows
    if hardware_refusals(_without_modules(implementation), device, direction):
        return False
    record = abstract_record(op, subject.case)
    fields = differentiable_fields(op.family, record) if direction == "backward" else frozenset[str]()
    return not record_refusals(op, implementation, record, direction, fields)


@functools.cache
def _without_modules(implementation: Implementation) -> Implementation:
    """Returns the implementation as if what it imports were installed."""
    backward = implementation.backward_requires
    return dataclasses.replace(
        implementation,
        requires=dataclasses.replace(implementation.requires, modules=()),
        backward_requires=None if backward is None else dataclasses.replace(backward, modules=()),
    )
