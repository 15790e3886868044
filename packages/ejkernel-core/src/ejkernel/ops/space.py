"""The configurations of an implementation: its own types, and how public fields set them."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import (
    BATCH_INVARIANT_FIELD,
    BaseOperationConfig,
    BwdParams,
    Direction,
    FwdParams,
    specified_leaf_fields,
)

PUBLIC_CONFIG_TYPES = (FwdParams, BwdParams, BaseOperationConfig)
"""The public configuration classes. A kernel may use one of these classes as its own configuration type."""


def _no_call_kind(record: Any) -> str | None:
    return None


class ConfigModule(Protocol):
    """The module `config` of a kernel directory, with the names that every kernel directory uses."""

    @property
    def PUBLIC_FIELDS(self) -> Mapping[str, str | tuple[str, ...]]:
        """Public configuration field -> field, or fields, of the kernel's own types."""
        ...

    def heuristic(self, record: Any, device: DeviceInfo, direction: Direction, /) -> Any:
        """Returns a complete configuration part, by rule."""
        ...

    def candidates(self, record: Any, device: DeviceInfo, direction: Direction, /) -> tuple[Any, ...]:
        """Returns the configuration parts worth measuring."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ConfigSpace:
    """The configurations of an implementation.

    A kernel declares frozen configuration types of its own, one per direction, whose fields are named for what they are
    in that kernel; a field may be such a type again, for a kernel of several loops. Its functions, rules, the store and
    shipped tables use these types; `public_fields` says which public fields set them. A call that sets another public
    field is served without it, and `explain` says so by name. A kernel with nothing to choose has `NO_CHOICE`.

    Attributes:
        heuristic: (record, device, direction) -> complete configuration part, by rule.
        candidates: (record, device, direction) -> configuration parts worth measuring.
        kind: Record -> what it has in common with the calls that share an entry of a shipped table; None where only
            calls of the same shapes do.
        forward: The type of the forward pass, or of both where they are paired.
        backward: The type of the backward pass, where that is another.
        batch_invariant: (record, device, direction) -> complete configuration part of calls in a `batch_invariant`
            block. It may read dtypes and sizes of heads and of the model, but no size that depends on the batch, except
            for fields that no sum depends on. None if the implementation claims no invariance, or has nothing to
            choose.
        fixed_if_invariant: Fields of `forward` that this rule alone decides in such a block: no part replaces them.
        public_fields: Public configuration field -> field of the kernel's own types that has its value, or all that
            have it; `"dkv.block_q"` is a field of a field. What a type does not have is left out.
    """

    heuristic: Callable[[Any, DeviceInfo, Direction], Any]
    candidates: Callable[[Any, DeviceInfo, Direction], tuple[Any, ...]]
    forward: type
    kind: Callable[[Any], str | None] = _no_call_kind
    backward: type | None = None
    batch_invariant: Callable[[Any, DeviceInfo, Direction], Any] | None = None
    fixed_if_invariant: tuple[str, ...] = ()
    public_fields: Mapping[str, str | tuple[str, ...]] = dataclasses.field(
        default_factory=dict[str, str | tuple[str, ...]], hash=False
    )

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fixed_if_invariant) - {field.name for field in dataclasses.fields(self.forward)})
        if unknown:
            raise ValueError(f"fixed_if_invariant: {self.forward.__name__} has no field {', '.join(unknown)}")

    @classmethod
    def of(
        cls,
        config: ConfigModule,
        *,
        forward: type,
        backward: type | None = None,
        kind: Callable[[Any], str | None] = _no_call_kind,
        fixed_if_invariant: tuple[str, ...] = (),
    ) -> "ConfigSpace":
        """Returns the configurations of a kernel directory, whose module `config` has the rules and public fields.

        A function `batch_invariant` of the module is the rule of `batch_invariant` blocks.

        Args:
            config: The module.
            forward: As the attribute.
            backward: As the attribute.
            kind: As the attribute.
            fixed_if_invariant: As the attribute.
        """
        return cls(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=forward,
            kind=kind,
            backward=backward,
            batch_invariant=getattr(config, "batch_invariant", None),
            fixed_if_invariant=fixed_if_invariant,
            public_fields=config.PUBLIC_FIELDS,
        )

    def kernel_type(self, direction: Direction) -> type:
        """Returns the kernel's own type of one direction."""
        return (self.backward or self.forward) if direction == "backward" else self.forward

    def is_kernel_type(self, part: Any, direction: Direction) -> bool:
        """Returns whether a part has the kernel's own fields, not public fields."""
        return isinstance(part, self.kernel_type(direction)) and not isinstance(part, PUBLIC_CONFIG_TYPES)

    def complete_part(self, heuristic_part: Any, part: Any, direction: Direction) -> Any:
        """Returns a part that a rule made, with the fields replaced that another part sets, public or the
        kernel's own.
        """
        settings = specified_leaf_fields(part)
        if not self.is_kernel_type(part, direction):
            public = self._public_fields(direction)
            settings = {field: value for name, value in settings.items() for field in public.get(name, ())}
        for path, value in settings.items():
            heuristic_part = _replace_nested_field(heuristic_part, path.split("."), value)
        return heuristic_part

    def unread_fields(self, part: Any, direction: Direction) -> list[str]:
        """Returns the fields that a public part sets and that the kernel does not have.

        A public configuration without parts sets both directions, and a field needs to be that of one.
        """
        if self.is_kernel_type(part, direction):
            return []
        if not isinstance(part, BaseOperationConfig):
            return sorted(specified_leaf_fields(part).keys() - self.readable_public_fields(direction))
        return sorted(
            specified_leaf_fields(part).keys()
            - part.call_argument_fields
            - self.readable_public_fields("forward")
            - self.readable_public_fields("backward")
        )

    def readable_public_fields(self, direction: Direction) -> frozenset[str]:
        """Returns the public fields that the kernel has, by the names they are set by."""
        return frozenset(self._public_fields(direction))

    def to_public_config(self, config: type[BaseOperationConfig], forward: Any, backward: Any) -> Any:
        """Returns the public configuration for the chosen parts of the two directions.

        A part that the public fields cannot express is held as it is by classes that have a part for each direction.
        """
        return config.from_parts(
            self.part_in_public_fields(config, forward, "forward"),
            self.part_in_public_fields(config, backward, "backward"),
        )

    def part_in_public_fields(self, config: type[BaseOperationConfig], part: Any, direction: Direction) -> Any:
        """Returns a part in the public fields. If the public fields cannot express it and the public class can hold it,
        returns it unchanged.
        """
        if not self.is_kernel_type(part, direction):
            return part
        public_type = config.part_types.get(direction, config)
        has = {field.name for field in dataclasses.fields(public_type)}
        values, shown, expressed = specified_leaf_fields(part), dict[str, Any](), set[str]()
        if not values.get(BATCH_INVARIANT_FIELD):
            values.pop(BATCH_INVARIANT_FIELD, None)
        for name, fields in self._public_fields(direction).items():
            choices = {values[field] for field in fields if field in values}
            if name in has and len(choices) == 1 and not expressed.issuperset(fields):
                shown[name] = choices.pop()
                expressed.update(fields)
        return part if direction in config.part_types and len(expressed) < len(values) else public_type(**shown)

    def _public_fields(self, direction: Direction) -> dict[str, tuple[str, ...]]:
        has = leaf_names(self.kernel_type(direction))
        named = {public: (to,) if isinstance(to, str) else to for public, to in self.public_fields.items()}
        present = {public: tuple(field for field in fields if field in has) for public, fields in named.items()}
        return {public: fields for public, fields in present.items() if fields}


@functools.cache
def leaf_names(config_type: type) -> frozenset[str]:
    """Returns the fields of a configuration type, those of its fields that are such types themselves with a dot."""
    return frozenset(_leaf_names(config_type))


def _leaf_names(config_type: type) -> Iterator[str]:
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        inner = hints[field.name]
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from (f"{field.name}.{name}" for name in _leaf_names(inner))
        else:
            yield field.name


def _replace_nested_field(part: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return dataclasses.replace(
        part, **{name: _replace_nested_field(getattr(part, name), rest, value) if rest else value}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoChoice:
    """The configuration of a kernel that has nothing to choose."""


def _no_choice_heuristic(record: Any, device: DeviceInfo, direction: Direction) -> NoChoice:
    return NoChoice()


def _no_candidates(record: Any, device: DeviceInfo, direction: Direction) -> tuple[NoChoice, ...]:
    return ()


NO_CHOICE = ConfigSpace(heuristic=_no_choice_heuristic, candidates=_no_candidates, forward=NoChoice)
"""The configurations of such a kernel."""
