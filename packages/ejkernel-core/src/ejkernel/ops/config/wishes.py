"""What a call's own configuration asks for, held against the kernels that are registered."""

import dataclasses

from ejkernel.ops.config.params import BaseOperationConfig, Direction, given_leaves
from ejkernel.ops.model import Op
from ejkernel.ops.plugins import registry


def hints(given: BaseOperationConfig | None, configured: BaseOperationConfig | None) -> frozenset[str]:
    """The fields that arguments of the call have set: a kernel that does not have them serves all the same."""
    if configured is None or configured is given:
        return frozenset()
    names = [field.name for field in dataclasses.fields(configured)]
    return frozenset(name for name in names if getattr(configured, name) != getattr(given, name, None))


def check_read(op: Op, cfg: BaseOperationConfig | None) -> None:
    """Refuses a configuration with a field that no kernel of an operation has.

    Raises:
        ValueError: There is one.
    """
    if cfg is None:
        return
    directions: tuple[Direction, ...] = ("forward", "backward") if cfg.part_types else ("forward",)
    for direction in directions:
        part = cfg.part(direction)
        if not isinstance(part, cfg.part_types.get(direction, type(cfg))):
            continue  # unset, or a kernel's own, which has all of its fields
        unread = given_leaves(part).keys() - cfg.about_call - read_by_any(op, direction, split=bool(cfg.part_types))
        if unread:
            where = f" in its {direction} pass" if cfg.part_types else ""
            raise ValueError(f"cfg: {op.name} has no kernel with {', '.join(sorted(unread))}{where}")


def read_by_any(op: Op, direction: Direction, *, split: bool) -> frozenset[str]:
    """The public fields that some registered kernel of a direction has.

    Args:
        op: The operation.
        direction: Which pass.
        split: Whether the public configuration tells the directions apart.
    """
    found: set[str] = set()
    for implementation in registry().implementations.get(op.name, ()):
        both: tuple[Direction, ...] = ("both",) if implementation.paired else ("forward", "backward")
        for role in both:
            if not split or role in (direction, "both"):
                found |= implementation.config.read(role)
    return frozenset(found)
