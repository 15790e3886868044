"""Choosing an implementation, and being able to say why."""

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from ejkernel.errors import EjkernelRuntimeError
from ejkernel.ops.arguments import given_fields
from ejkernel.ops.config.params import Direction, given_values
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Family, Implementation, Op, Requires
from ejkernel.ops.plugins import Plugin, registry

Status = Literal["chosen", "usable", "refused"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What dispatch thinks of one implementation for one call."""

    implementation: Implementation
    status: Status
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        i, reasons = self.implementation, "; ".join(self.reasons)
        return f"{i.name:<16} {i.platform:<8} priority {i.priority:>4}  {self.status:<8} {reasons}".rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision for one direction of a call.

    Attributes:
        op: Operation name.
        direction: `"forward"` or `"backward"`.
        device: The device it was made for.
        platform: The toolchain that was asked for, or `"auto"`.
        verdicts: One for each registered implementation, best first.
        failed_plugins: Plugins that could not take part.
        config: The configuration part, once the chain has been asked.
        tier: The tier of the chain that gave it.
        trail: One sentence for each tier that was asked.
    """

    op: str
    direction: Direction
    device: DeviceInfo
    platform: str
    verdicts: tuple[Verdict, ...]
    failed_plugins: tuple[Plugin, ...] = ()
    config: Any = None
    tier: str | None = None
    trail: tuple[str, ...] = ()

    @property
    def implementation(self) -> Implementation | None:
        """The chosen implementation, or None where every one refused."""
        return next((v.implementation for v in self.verdicts if v.status == "chosen"), None)

    def __str__(self) -> str:
        lines = [f"{self.op} {self.direction} on {self.device}:"]
        lines += [f"  {verdict}" for verdict in self.verdicts]
        if self.platform not in ("auto", *(v.implementation.platform for v in self.verdicts)):
            lines.append(f"  no installed backend has an implementation for platform {self.platform!r}")
        lines += [f"  plugin {p.name} ({p.distribution}) not loaded: {p.error}" for p in self.failed_plugins]
        if self.tier:
            lines.append(f"  config from {self.tier}: {given_values(self.config)}")
            lines += [f"    {step}" for step in self.trail]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a call would do. `print` it.

    Attributes:
        forward: The forward choice.
        backward: The backward choice, as if every differentiable argument were differentiated.
    """

    forward: Choice
    backward: Choice

    def __str__(self) -> str:
        return f"{self.forward}\n{self.backward}"


class NoImplementationError(EjkernelRuntimeError, NotImplementedError):
    """Nobody can serve a call; the message is the table of verdicts.

    Attributes:
        choice: The table, as data.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        super().__init__(f"no implementation serves this call\n{choice}")


def choose(
    op: Op, record: Any, device: DeviceInfo, platform: str, direction: Direction, wanted: frozenset[str] = frozenset()
) -> Choice:
    """Judges every registered implementation of `op` for `record` and picks the best that serves.

    Args:
        op: The operation.
        record: Lowered record (arrays, tracers or shapes).
        device: The device the call is for.
        platform: A toolchain, or `"auto"`. An explicit one is never replaced.
        direction: Which pass.
        wanted: For backward: the record fields whose gradient is needed.
    """
    found = registry()
    verdicts: list[Verdict] = []
    for implementation in found.implementations.get(op.name, ()):
        reasons = tuple(refusals(op.family, implementation, record, device, platform, direction, wanted))
        taken = any(v.status == "chosen" for v in verdicts)
        verdicts.append(Verdict(implementation, "refused" if reasons else "usable" if taken else "chosen", reasons))
    return Choice(
        op=op.name,
        direction=direction,
        device=device,
        platform=platform,
        verdicts=tuple(verdicts),
        failed_plugins=found.failed,
    )


def refusals(
    family: Family,
    implementation: Implementation,
    record: Any,
    device: DeviceInfo,
    platform: str,
    direction: Direction,
    wanted: frozenset[str],
) -> Iterator[str]:
    """Sentences saying why an implementation cannot serve one direction of a call; none if it can."""
    if platform not in ("auto", implementation.platform):
        yield f"platform={platform!r} was asked for"
    if direction == "backward":
        yield from _gradient_refusals(implementation, wanted)
    requires = implementation.requires_for(direction)
    yield from hardware_refusals(implementation, device, direction)
    yield from _record_refusals(family, requires, record)


def hardware_refusals(
    implementation: Implementation, device: DeviceInfo, direction: Direction = "forward"
) -> tuple[str, ...]:
    """The sentences that are the same for every call on a device; none where all it needs is there."""
    requires = implementation.requires_for(direction)
    return _hardware_refusals(requires.devices, requires.modules, requires.min_compute_capability, device)


def made_for(family: Family, implementation: Implementation, record: Any, direction: Direction) -> bool:
    """Whether an implementation serves a direction of a call on the devices that it is for."""
    if direction == "backward" and implementation.backward is None:
        return False
    return not any(_record_refusals(family, implementation.requires_for(direction), record))


def _gradient_refusals(implementation: Implementation, wanted: frozenset[str]) -> Iterator[str]:
    if implementation.backward is None:
        yield "has no backward"
        return
    missing = sorted(wanted - implementation.gradients)
    if missing:
        yield f"gives no gradient for {', '.join(missing)}"


@functools.cache
def _hardware_refusals(
    devices: frozenset[str], modules: tuple[str, ...], capability: float | None, device: DeviceInfo
) -> tuple[str, ...]:
    """The part of a verdict that is the same for every call of a process."""
    reasons = []
    if not devices & device.names:
        reasons.append(f"needs {' or '.join(sorted(devices))}, this is {device.platform}")
    reasons += [f"module {name} is not installed" for name in modules if importlib.util.find_spec(name) is None]
    if capability is not None and device.compute_capability is not None and device.compute_capability < capability:
        reasons.append(f"needs compute capability {capability}, this is {device.compute_capability}")
    return tuple(reasons)


def _record_refusals(family: Family, requires: Requires, record: Any) -> Iterator[str]:
    dtype = jnp.dtype(family.dtype(record)).name
    if dtype not in requires.dtypes:
        yield f"dtype {dtype} is not among {', '.join(sorted(requires.dtypes))}"
    if requires.head_dims is not None:
        bad = [d for d in family.head_dims(record) if d not in requires.head_dims]
        if bad:
            yield f"head size {', '.join(map(str, bad))} is not in {requires.head_dims}"
    for name in given_fields(record):
        if name not in requires.handles:
            yield f"{name} is not handled"
    yield from requires.extra(record)
