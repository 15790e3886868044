"""Chooses the implementation of a call, and keeps the reasons for the choice.

Every registered implementation gets a verdict: refused, with all its reasons, or usable. The first usable one in the
order of choice is chosen. `explain` prints these verdicts, and they are the error of a call that none can serve.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.families.contract import Family
from ejkernel.ops import evidence
from ejkernel.ops.batch_invariance import invariance_refusals
from ejkernel.ops.config.selection import foreign_part_reason
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation, Op, Requires
from ejkernel.ops.params import BaseOperationConfig, Direction, set_fields_as_text
from ejkernel.ops.plugins import Plugin, registry
from ejkernel.ops.refusal_names import name_public_argument
from ejkernel.ops.toolchain import missing_module_reason
from ejkernel.types.arguments import array_fields, non_default_fields

Status = Literal["chosen", "usable", "refused"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of judging one implementation for one call.

    Attributes:
        implementation: The implementation.
        status: "chosen"; "usable" for one that could serve but comes later in the order; or "refused".
        reasons: Why it is refused; empty otherwise.
        remark: Why it is chosen, if there is another reason than the order of choice; empty otherwise.
        unconfirmed_reason: Why it comes after all implementations with evidence for the device; empty if it does not.
        confirmed_on: The device and the toolchain on which all its tests have passed; empty without evidence.
        priority: Its priority for the call; None if the priority depends on the call and the kernels cannot compute it.
        priority_reason: The reason for a priority that depends on the call; empty if the implementation has none.
    """

    implementation: Implementation
    status: Status
    reasons: tuple[str, ...] = ()
    remark: str = ""
    unconfirmed_reason: str = ""
    confirmed_on: str = ""
    priority: int | None = None
    priority_reason: str = ""

    @property
    def remarks(self) -> str:
        """Returns the reasons of a refusal, or else the remarks on its place in the order of choice."""
        remarks = (self.remark, self.priority_reason, self.unconfirmed_reason, self.confirmed_on)
        return "; ".join(self.reasons or filter(None, remarks))

    def __str__(self) -> str:
        return _table_row(self)


def _table_row(verdict: Verdict, name_width: int = 16) -> str:
    name, platform = verdict.implementation.name, verdict.implementation.platform
    priority = "" if verdict.priority is None else f"priority {verdict.priority:>4}"
    return f"{name:<{name_width}} {platform:<8} {priority:<13}  {verdict.status:<8} {verdict.remarks}".rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision for one direction of a call.

    Attributes:
        op: Operation name.
        direction: `"forward"` or `"backward"`.
        device: The device of the call.
        platform: The toolchain that the call requests, or `"auto"`.
        verdicts: One for each registered implementation, best first.
        failed_plugins: Plugins that did not load.
        notes: Sentences about implementations that were renamed because two distributions use one name.
        config: The configuration; None until the chain has chosen one.
        tier: The tier of the chain that it comes from; `"error"` if no tier that the policy allows has one.
        trail: One sentence per tier, up to the one that answered.
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
        """Returns the chosen implementation; None if all are refused."""
        return next((v.implementation for v in self.verdicts if v.status == "chosen"), None)

    def __str__(self) -> str:
        lines = [f"{self.op} {self.direction} on {self.device}:"]
        name_width = max((16, *(len(v.implementation.name) for v in self.verdicts)))
        lines += [f"  {_table_row(verdict, name_width)}" for verdict in self.verdicts]
        if self.platform not in ("auto", *(v.implementation.platform for v in self.verdicts)):
            lines.append(f"  no installed backend has an implementation for platform {self.platform!r}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  plugin {p.name} ({p.distribution}) not loaded: {p.error}" for p in self.failed_plugins]
        if self.tier:
            lines.append(f"  config from {self.tier}: {set_fields_as_text(self.config)}")
            lines += [f"    {step}" for step in self.trail]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The choice of implementations for a call. Printing it gives a table.

    Attributes:
        forward: The forward choice of a call that is not differentiated.
        backward: The backward choice, as if every differentiable argument were differentiated.
        differentiated_forward: The forward choice of the differentiated call, where another implementation serves it: a
            paired implementation takes both passes or neither. None otherwise.
        conventions: One sentence for each point of the call that libraries define differently.
    """

    forward: Choice
    backward: Choice
    differentiated_forward: Choice | None = None
    conventions: tuple[str, ...] = ()

    def __str__(self) -> str:
        choices = [str(self.forward), str(self.backward)]
        if self.differentiated_forward is not None:
            choices.insert(1, f"where the call is differentiated, {self.differentiated_forward}")
        return "\n".join([*choices, *self.conventions])


def choose(
    op: Op,
    record: Any,
    device: DeviceInfo,
    platform: str,
    direction: Direction,
    grad_fields: frozenset[str] = frozenset(),
    cfg: BaseOperationConfig | None = None,
    batch_invariant: bool = False,
) -> Choice:
    """Judges every registered implementation of an operation for a call, and chooses the first usable one.

    Args:
        op: The operation.
        record: Lowered record (arrays, tracers or shapes).
        device: The device the call is for.
        platform: A toolchain, or `"auto"`. An explicit one is never replaced.
        direction: The pass.
        grad_fields: For backward: the record fields whose gradient is needed.
        cfg: The call's own configuration.
        batch_invariant: Whether the call was made in a `batch_invariant` block, which restricts forward passes only.
    """
    registered = registry()
    verdicts: list[Verdict] = []
    # All are judged, not only those up to the first usable one: `explain` and the error show the whole table.
    for implementation in registered.implementations.get(op.name, ()):
        found = refusals(op.family, implementation, record, device, platform, direction, grad_fields)
        reasons = tuple(name_public_argument(op, reason) for reason in found)
        reasons += _foreign_config(op, implementation, direction, cfg)
        restricted = batch_invariant and direction == "forward"
        if restricted:
            reasons += tuple(invariance_refusals(op, implementation, record))
        verdict = _make_verdict(op, implementation, record, device, direction, reasons)
        fixed = implementation.invariant_priority if restricted and not reasons else None
        verdicts.append(verdict if fixed is None else dataclasses.replace(verdict, priority=fixed, priority_reason=""))
    return Choice(
        op=op.name,
        direction=direction,
        device=device,
        platform=platform,
        verdicts=with_first_chosen(sorted(verdicts, key=_order_of_choice_key)),
        failed_plugins=registered.failed,
        notes=tuple(sentence for (name, _), sentence in registered.renaming_notes.items() if name == op.name),
    )


def _make_verdict(
    op: Op,
    implementation: Implementation,
    record: Any,
    device: DeviceInfo,
    direction: Direction,
    reasons: tuple[str, ...],
) -> Verdict:
    # A priority function may divide by sizes and look at dtypes that the kernels do not accept, so it is called only
    # for records that they can compute, on this device or on another.
    knows_priority = (
        not reasons
        or implementation.constant_priority is not None
        or can_compute(op.family, implementation, record, direction)
    )
    explains = implementation.priority_reason
    return Verdict(
        implementation,
        "refused" if reasons else "usable",
        reasons,
        unconfirmed_reason=evidence.unconfirmed(implementation, op.name, device),
        confirmed_on=evidence.confirmed(implementation, op.name, device),
        priority=implementation.priority_for(record, device, direction) if knows_priority else None,
        priority_reason="" if reasons or explains is None else explains(record, device, direction),
    )


def _order_of_choice_key(verdict: Verdict) -> tuple[bool, int, str]:
    """Returns the key of the order of choice: evidence, then priority, then name."""
    # An unconfirmed kernel may be wrong on this device, so it comes after a slower one that is known to be right. The
    # name breaks ties: the order in which plugins load must not decide which kernel a call runs.
    return bool(verdict.unconfirmed_reason), -(verdict.priority or 0), verdict.implementation.name


def _foreign_config(
    op: Op, implementation: Implementation, direction: Direction, cfg: BaseOperationConfig | None
) -> tuple[str, ...]:
    """Returns why an implementation cannot use the call's `cfg=`: its fields are those of another kernel.

    A public field that the implementation does not read is no reason to refuse: it only tunes, and has no effect.
    """
    direction = "both" if implementation.paired else direction
    part = None if cfg is None else cfg.part_of(direction)
    foreign = None if part is None else foreign_part_reason(op, implementation, part, direction)
    return (f"cfg: {foreign}",) if foreign else ()


def refuse_backward_without_handles(choice: Choice, pullback_field: str) -> Choice:
    """Returns a choice among the backward passes that honour a piece of the `Pullback`, such as `lse_cotangent`."""
    verdicts = [
        v
        if pullback_field in v.implementation.requires_for(choice.direction).handles
        else dataclasses.replace(v, status="refused", reasons=(*v.reasons, f"{pullback_field} is not handled"))
        for v in choice.verdicts
    ]
    return dataclasses.replace(choice, verdicts=with_first_chosen(verdicts))


PAIRED_REMARK = "paired: serves both passes with one configuration"


def with_first_chosen(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Returns the verdicts, with the first that is not refused marked as chosen and all later ones as usable."""
    chosen = next((i for i, v in enumerate(verdicts) if v.status != "refused"), None)
    return tuple(
        v
        if v.status == "refused"
        else dataclasses.replace(v, status="chosen", remark=PAIRED_REMARK if v.implementation.paired else "")
        if i == chosen
        else dataclasses.replace(v, status="usable")
        for i, v in enumerate(verdicts)
    )


def refusals(
    family: Family,
    implementation: Implementation,
    record: Any,
    device: DeviceInfo,
    platform: str,
    direction: Direction,
    grad_fields: frozenset[str],
) -> Iterator[str]:
    """Yields the reasons why an implementation cannot serve one direction of a call; none if it can."""
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
    """Returns the reasons that hold for every call on a device: its kind, missing modules, its compute capability."""
    requires = implementation.requires_for(direction)
    return _hardware_refusals(requires.devices, requires.modules, requires.min_compute_capability, device)


def can_compute(family: Family, implementation: Implementation, record: Any, direction: Direction) -> bool:
    """Returns whether the kernels can compute one direction of a call, on a device of the kind that they are for."""
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
    """Computes `hardware_refusals` once per device: looking for modules reads the disk."""
    reasons = []
    if not devices & device.names:
        reasons.append(f"needs {' or '.join(sorted(devices))}, this is {device.platform}")
    reasons += filter(None, map(missing_module_reason, modules))
    if capability is not None and device.compute_capability is not None and device.compute_capability < capability:
        reasons.append(f"needs compute capability {capability}, this is {device.compute_capability}")
    return tuple(reasons)


def _record_refusals(family: Family, requires: Requires, record: Any) -> Iterator[str]:
    dtype = jnp.dtype(family.dtype(record)).name
    if dtype not in requires.dtypes:
        yield f"dtype {dtype} is not among {', '.join(sorted(requires.dtypes))}"
    if requires.head_dims is not None:
        bad = [d for d in dict.fromkeys(family.head_dims(record)) if d not in requires.head_dims]
        if bad:
            yield f"head size {', '.join(map(str, bad))} is not in {requires.head_dims}"
    for name in non_default_fields(record):
        if name not in requires.handles:
            yield f"{name} is not handled"
    arrays = [(name, x) for name, value in array_fields(record).items() for x in jax.tree.leaves(value)]
    symbolic = {name: x.shape for name, x in arrays if _is_symbolic(x)}
    if symbolic and not requires.symbolic:
        yield f"sizes of {', '.join(symbolic)} are symbolic"
        return
    empty = [name for name, x in arrays if any(size == 0 for size in x.shape if type(size) is int)]
    if empty and not _has_no_grid(requires.devices):
        yield f"{empty[0]} is empty"
        return
    # `extra` may compute with sizes, so it comes after the checks that all sizes are known and not 0.
    yield from requires.extra(record)


def _has_no_grid(devices: frozenset[str]) -> bool:
    """Returns whether an implementation is XLA's programs, not a kernel with a grid, which must not be empty.

    XLA's run on CPUs and on all GPUs, or on CPUs alone; kernels run on CPUs only where they are interpreted.
    """
    return "cpu" in devices and ("gpu" in devices or len(devices) == 1)


def _is_symbolic(value: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(value, "shape", ()))
