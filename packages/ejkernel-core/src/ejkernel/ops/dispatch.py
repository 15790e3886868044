"""Choosing an implementation, and being able to say why."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from ejkernel.families.contract import Family
from ejkernel.ops import evidence
from ejkernel.ops.config.selection import foreign_part
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation, Op, Requires
from ejkernel.ops.params import BaseOperationConfig, Direction, given_values
from ejkernel.ops.plugins import Plugin, registry
from ejkernel.ops.toolchain import lacking
from ejkernel.types.arguments import array_fields, non_default_fields

Status = Literal["chosen", "usable", "refused"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What dispatch thinks of one implementation for one call.

    Attributes:
        implementation: The implementation.
        status: Chosen, usable in its place, or refused.
        reasons: Why it is refused; empty otherwise.
        remark: Why it is chosen, where that is more than its place in the order.
        unconfirmed: Why it comes after all that are confirmed on the device; empty where it does not.
        confirmed: On which device, and with which toolchain, all its tests have passed; empty without evidence.
        priority: Its priority for the call; None where it depends on the call, and it cannot compute the call.
    """

    implementation: Implementation
    status: Status
    reasons: tuple[str, ...] = ()
    remark: str = ""
    unconfirmed: str = ""
    confirmed: str = ""
    priority: int | None = None

    @property
    def remarks(self) -> str:
        """What there is to say about it: why it is refused, or about its place in the order."""
        return "; ".join(self.reasons or filter(None, (self.remark, self.unconfirmed, self.confirmed)))

    def __str__(self) -> str:
        i, reasons = self.implementation, self.remarks
        priority = "" if self.priority is None else f"priority {self.priority:>4}"
        return f"{i.name:<16} {i.platform:<8} {priority:<13}  {self.status:<8} {reasons}".rstrip()


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
        notes: Sentences about implementations that have another name here than their plugin gave them.
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
    notes: tuple[str, ...] = ()
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
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  plugin {p.name} ({p.distribution}) not loaded: {p.error}" for p in self.failed_plugins]
        if self.tier:
            lines.append(f"  config from {self.tier}: {given_values(self.config)}")
            lines += [f"    {step}" for step in self.trail]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a call would do. `print` it.

    Attributes:
        forward: The forward choice of a call that is not differentiated.
        backward: The backward choice, as if every differentiable argument were differentiated.
        differentiated: The forward choice of the differentiated call, where another implementation serves it: a
            paired implementation takes both passes or neither. None otherwise.
        conventions: What the call means where libraries differ, a sentence each.
    """

    forward: Choice
    backward: Choice
    differentiated: Choice | None = None
    conventions: tuple[str, ...] = ()

    def __str__(self) -> str:
        choices = [str(self.forward), str(self.backward)]
        if self.differentiated is not None:
            choices.insert(1, f"where the call is differentiated, {self.differentiated}")
        return "\n".join([*choices, *self.conventions])


def choose(
    op: Op,
    record: Any,
    device: DeviceInfo,
    platform: str,
    direction: Direction,
    grad_fields: frozenset[str] = frozenset(),
    cfg: BaseOperationConfig | None = None,
) -> Choice:
    """Judges every registered implementation of `op` for `record` and picks the best that serves.

    Args:
        op: The operation.
        record: Lowered record (arrays, tracers or shapes).
        device: The device the call is for.
        platform: A toolchain, or `"auto"`. An explicit one is never replaced.
        direction: Which pass.
        grad_fields: For backward: the record fields whose gradient is needed.
        cfg: The call's own configuration.
    """
    registered = registry()
    verdicts: list[Verdict] = []
    for implementation in registered.implementations.get(op.name, ()):
        reasons = tuple(refusals(op.family, implementation, record, device, platform, direction, grad_fields))
        reasons += _foreign_config(op, implementation, direction, cfg)
        verdicts.append(_verdict(op, implementation, record, device, direction, reasons))
    return Choice(
        op=op.name,
        direction=direction,
        device=device,
        platform=platform,
        verdicts=_with_first_chosen(sorted(verdicts, key=_order)),
        failed_plugins=registered.failed,
        notes=tuple(sentence for (name, _), sentence in registered.renamed.items() if name == op.name),
    )


def _verdict(
    op: Op,
    implementation: Implementation,
    record: Any,
    device: DeviceInfo,
    direction: Direction,
    reasons: tuple[str, ...],
) -> Verdict:
    # A priority that depends on the call is asked for calls that the kernels can compute, here or elsewhere.
    knows_priority = (
        not reasons
        or implementation.usual_rank is not None
        or can_compute(op.family, implementation, record, direction)
    )
    return Verdict(
        implementation,
        "refused" if reasons else "usable",
        reasons,
        unconfirmed=evidence.unconfirmed(implementation, op.name, device),
        confirmed=evidence.confirmed(implementation, op.name, device),
        priority=implementation.rank(record, device, direction) if knows_priority else None,
    )


def _order(verdict: Verdict) -> tuple[bool, int, str]:
    """Returns the order of choice: those that evidence confirms, and those that need none, come before all others."""
    return bool(verdict.unconfirmed), -(verdict.priority or 0), verdict.implementation.name


def _foreign_config(
    op: Op, implementation: Implementation, direction: Direction, cfg: BaseOperationConfig | None
) -> tuple[str, ...]:
    """Returns why a call's own configuration cannot be the implementation's: it is in another kernel's own fields.

    A public field that the implementation does not read is no reason: it only tunes, and has no effect.
    """
    direction = "both" if implementation.paired else direction
    part = None if cfg is None else cfg.part_of(direction)
    foreign = None if part is None else foreign_part(op, implementation, part, direction)
    return (f"cfg: {foreign}",) if foreign else ()


def choose_pair(forward: Choice, backward: Choice) -> tuple[Choice, Choice]:
    """Returns the two choices for a call that is differentiated, from those made for each pass alone.

    A paired implementation serves both passes or neither; any other forward pass needs some backward pass that is not
    paired. The first forward pass for which this holds is chosen.
    """
    forwards = {v.implementation.name: v for v in forward.verdicts}
    backwards = {v.implementation.name: v for v in backward.verdicts}
    unpaired = any(v.status != "refused" and not v.implementation.paired for v in backward.verdicts)
    judged = _with_first_chosen([_as_first(v, backwards, unpaired) for v in forward.verdicts])
    chosen = next((v.implementation for v in judged if v.status == "chosen"), None)
    second = [_as_second(v, forwards, chosen) for v in backward.verdicts]
    if chosen is None or not chosen.paired:
        followers = _with_first_chosen(second)
    else:
        same = [dataclasses.replace(v, status="chosen", remark=PAIRED) for v in second if v.implementation is chosen]
        followers = tuple(same[0] if v.implementation is chosen else v for v in second)
    return dataclasses.replace(forward, verdicts=judged), dataclasses.replace(backward, verdicts=followers)


def exclude_paired(choice: Choice) -> Choice:
    """Returns a choice among the implementations whose passes need not come together."""
    reason = "paired, and the passes of this call are chosen apart"
    verdicts = [
        dataclasses.replace(v, status="refused", reasons=(*v.reasons, reason)) if v.implementation.paired else v
        for v in choice.verdicts
    ]
    return dataclasses.replace(choice, verdicts=_with_first_chosen(verdicts))


def require_handles(choice: Choice, piece: str) -> Choice:
    """Returns a choice of a backward pass among the implementations that honour a piece of the `Pullback`."""
    verdicts = [
        v
        if piece in v.implementation.requires_for(choice.direction).handles
        else dataclasses.replace(v, status="refused", reasons=(*v.reasons, f"{piece} is not handled"))
        for v in choice.verdicts
    ]
    return dataclasses.replace(choice, verdicts=_with_first_chosen(verdicts))


PAIRED = "paired: serves both passes with one configuration"


def _with_first_chosen(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Returns the verdicts with the first that does not refuse as the choice."""
    chosen = next((i for i, v in enumerate(verdicts) if v.status != "refused"), None)
    return tuple(
        v
        if v.status == "refused"
        else dataclasses.replace(v, status="chosen", remark=PAIRED if v.implementation.paired else "")
        if i == chosen
        else dataclasses.replace(v, status="usable")
        for i, v in enumerate(verdicts)
    )


def _as_first(verdict: Verdict, backwards: Mapping[str, Verdict], unpaired: bool) -> Verdict:
    """Returns a verdict on a forward pass that a backward pass follows."""
    if verdict.status == "refused":
        return verdict
    if not verdict.implementation.paired:
        reasons = () if unpaired else ("no backward pass serves after it",)
    else:
        same = backwards[verdict.implementation.name]
        reasons = tuple(f"paired, and its backward refuses: {reason}" for reason in same.reasons)
    return dataclasses.replace(verdict, status="refused", reasons=reasons) if reasons else verdict


def _as_second(verdict: Verdict, forwards: Mapping[str, Verdict], chosen: Implementation | None) -> Verdict:
    """Returns a verdict on a backward pass that follows the chosen forward pass."""
    implementation = verdict.implementation
    if verdict.status == "refused" or not implementation.paired or implementation is chosen:
        return verdict
    same = forwards.get(implementation.name)
    reasons = tuple(f"paired, and its forward refuses: {reason}" for reason in (same.reasons if same else ()))
    reasons = reasons or ("paired, and another forward pass is chosen",)
    return dataclasses.replace(verdict, status="refused", reasons=reasons)


def refusals(
    family: Family,
    implementation: Implementation,
    record: Any,
    device: DeviceInfo,
    platform: str,
    direction: Direction,
    grad_fields: frozenset[str],
) -> Iterator[str]:
    """Sentences saying why an implementation cannot serve one direction of a call; none if it can."""
    if platform not in ("auto", implementation.platform):
        yield f"platform={platform!r} was asked for"
    if direction == "backward":
        yield from _gradient_refusals(implementation, grad_fields)
    requires = implementation.requires_for(direction)
    yield from hardware_refusals(implementation, device, direction)
    yield from _record_refusals(family, requires, record)


def hardware_refusals(
    implementation: Implementation, device: DeviceInfo, direction: Direction = "forward"
) -> tuple[str, ...]:
    """Returns the sentences that are the same for every call on a device; none where all it needs is there."""
    requires = implementation.requires_for(direction)
    return _hardware_refusals(requires.devices, requires.modules, requires.min_compute_capability, device)


def can_compute(family: Family, implementation: Implementation, record: Any, direction: Direction) -> bool:
    """Returns whether an implementation serves a direction of a call on the devices that it is for."""
    if direction == "backward" and implementation.backward is None:
        return False
    return not any(_record_refusals(family, implementation.requires_for(direction), record))


def _gradient_refusals(implementation: Implementation, grad_fields: frozenset[str]) -> Iterator[str]:
    if implementation.backward is None:
        yield "has no backward"
        return
    missing = sorted(grad_fields - implementation.gradients)
    if missing:
        yield f"gives no gradient for {', '.join(missing)}"


@functools.cache
def _hardware_refusals(
    devices: frozenset[str], modules: tuple[str, ...], capability: float | None, device: DeviceInfo
) -> tuple[str, ...]:
    """Returns the part of a verdict that is the same for every call of a process."""
    reasons = []
    if not devices & device.names:
        reasons.append(f"needs {' or '.join(sorted(devices))}, this is {device.platform}")
    reasons += filter(None, map(lacking, modules))
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
    for name in non_default_fields(record):
        if name not in requires.handles:
            yield f"{name} is not handled"
    symbolic = {name: x.shape for name, x in array_fields(record).items() if _is_symbolic(x)}
    if symbolic and not requires.symbolic:
        yield f"sizes of {', '.join(symbolic)} are symbolic"
        return
    empty = [
        name for name, x in array_fields(record).items() if any(size == 0 for size in x.shape if type(size) is int)
    ]
    if empty and not _has_no_grid(requires.devices):
        yield f"{empty[0]} is empty"
        return
    yield from requires.extra(record)


def _has_no_grid(devices: frozenset[str]) -> bool:
    """Returns whether an implementation is XLA's programs, not a kernel with a grid, which must not be empty.

    XLA's run on CPUs and on all GPUs, or on CPUs alone; kernels run on CPUs only where they are interpreted.
    """
    return "cpu" in devices and ("gpu" in devices or len(devices) == 1)


def _is_symbolic(value: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(value, "shape", ()))
