"""The request to the configuration chain, and the selection that answers it."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from ejkernel.ops.config.key import ConfigKey, device_label, schema_hash, signature
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.model import Implementation, Op
from ejkernel.ops.params import BaseOperationConfig, Direction, piece
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import run_both_passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the chain: the configuration part of one direction of one call.

    Attributes:
        op: The operation.
        implementation: The chosen implementation.
        direction: Which pass; `"both"` for a paired implementation.
        device: Where it will run.
        record: The lowered record (only shapes and structure are read).
        override: The call's own configuration, or None.
        batch_invariant: Whether the configuration must be the same for all batches: from `cfg=`, an overlay by the
            operation's name, or a fixed rule.
    """

    op: Op
    implementation: Implementation
    direction: Direction
    device: DeviceInfo
    record: Any
    override: BaseOperationConfig | None = None
    batch_invariant: bool = False

    def key(self) -> ConfigKey:
        """Returns what the answer is stored under."""
        version = registry().versions.get((self.op.name, self.implementation.name), "unknown")
        return ConfigKey(
            op=op_label(self.op),
            implementation=f"{self.implementation.name}@{version}",
            direction=self.direction,
            device=device_label(self.device),
            schema=schema_hash(self.part_type()),
            call="any batch" if self.batch_invariant else signature(self.record),
        )

    def part_type(self) -> type:
        """Returns type of the configuration part of this direction."""
        return self.implementation.config.kernel_type(self.direction)

    def kernel(self) -> Callable[[Any, Any], Any]:
        """Returns what is measured: (record, or `Pullback` for the backward pass or both, configuration part) ->
        results.
        """
        if self.direction == "both":
            forward, backward = self.implementation.function("forward"), self.implementation.function("backward")
            return functools.partial(run_both_passes, forward, backward)
        return self.implementation.function(self.direction)

    def kind(self) -> str | None:
        """Returns what the call has in common with those that share its entry in a shipped table; None if it has its
        own.
        """
        return self.implementation.config.kind(self.record)

    def heuristic(self) -> Any:
        """Returns what the implementation's rule says."""
        space = self.implementation.config
        rule = space.batch_invariant if self.batch_invariant else None
        return (rule or space.heuristic)(self.record, self.device, self.direction)

    def complete_with_heuristic(self, part: Any) -> Any:
        """Returns `part` in the kernel's own fields, with unset fields filled by the implementation's heuristic.

        In a `batch_invariant` block, the fields `ConfigSpace.fixed_if_invariant` are the rule's, whatever `part` says.
        """
        rule = self.heuristic()
        completed = self.implementation.config.complete_part(rule, part, self.direction)
        fixed = self.implementation.config.fixed_if_invariant if self.batch_invariant else ()
        return dataclasses.replace(completed, **{name: getattr(rule, name) for name in fixed})

    def operations_of_family(self) -> tuple[Op, ...]:
        """Returns the operation and, after it, the other operations of its family."""
        others = (op for op in registry().ops.values() if op.family is self.op.family and op.name != self.op.name)
        return (self.op, *sorted(others, key=lambda op: op.name))

    def platform_and_backend(self) -> dict[str, str]:
        """Returns what a configuration must have been made for to apply."""
        return {"platform": self.implementation.platform, "backend": self.device.platform}


def op_label(op: Op) -> str:
    """Returns an operation in keys, with the version of its meaning."""
    return f"{op.name}@{op.version}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chain's answer: the part, the tier it came from, and a sentence for each tier that was asked."""

    part: Any
    tier: str
    trail: tuple[str, ...]


def foreign_part_reason(op: Op, implementation: Implementation, part: Any, direction: Direction) -> str | None:
    """Returns why a configuration part cannot be the implementation's: it is of another kernel's own type."""
    public_type = op.config.part_types.get(piece(direction), op.config)
    if isinstance(part, (public_type, implementation.config.kernel_type(direction))):
        return None
    return f"{type(part).__name__} is a configuration of another kernel"


def __getattr__(name: str) -> Any:
    return importlib.import_module("ejkernel.compat.paths").resolve_old_name(__name__, name)
