"""Configurations: choices that change the speed of a call and never its answer (beyond rounding).

Every class is frozen, hashable through all of its fields and serialisable with `to_dict` / `to_json`.
"""

import dataclasses
import operator
from typing import Any, ClassVar, Literal, Self

import msgspec

Direction = Literal["forward", "backward", "both"]
"""The pass of a call. `"both"` stands for both passes of a paired implementation, which share one configuration."""
Platform = Literal["triton", "pallas", "cuda", "xla", "auto"]
Backend = Literal["gpu", "tpu", "cpu", "any"]


@dataclasses.dataclass(frozen=True)
class FwdParams:
    """Tile sizes and launch parameters of a forward kernel; `None` lets the heuristics decide.

    Raises:
        ValueError: A value is not a positive integer.

    Attributes:
        blocksize_m: Rows of the output tile of a matrix product.
        blocksize_k: Contracted elements per step of a matrix product; keys per tile are `kv_blocksize`.
        blocksize_n: Columns of the output tile.
        q_blocksize: Queries per tile.
        kv_blocksize: Keys per tile.
        blocksize_heads: Heads per tile.
        blocksize_keys: Keys per tile in decode kernels.
        num_key_splits: Independent partial softmaxes over the keys.
        num_warps: Warps per program.
        num_stages: Software pipeline depth.
        seq_blocksize: Sequences worked on at once in decode kernels.
    """

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    seq_blocksize: int | None = None

    def __post_init__(self) -> None:
        _canonicalise(self)


@dataclasses.dataclass(frozen=True)
class BwdParams:
    """Tile sizes and launch parameters of a backward kernel; fields as in `FwdParams`."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _canonicalise(self)


def _canonicalise(params: FwdParams | BwdParams) -> None:
    # 128.0 and True equal 128 and 1, so that wrong types would go unseen by keys and reach a compiler.
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
            raise ValueError(f"{type(params).__name__}.{field.name}: got {value!r}, wants a positive integer")
        object.__setattr__(params, field.name, operator.index(value))


def specified_leaf_fields(part: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the fields of a configuration part that are set; those of a field that has fields of its
    own with a dot.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        name, value = f"{prefix}{field.name}", getattr(part, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= specified_leaf_fields(value, f"{name}.")
        elif value is not None:
            values[name] = value
    return values


BATCH_INVARIANT_FIELD = "batch_invariant"
"""A field of kernels' configuration types that is true in a `batch_invariant` block, and that callers do not set."""


def set_fields_as_text(part: Any) -> str:
    """Returns the fields of a configuration part that are set: `q_blocksize=128, kv_blocksize=64`."""
    fields = {} if part is None else specified_leaf_fields(part)
    if not fields.get(BATCH_INVARIANT_FIELD):
        fields.pop(BATCH_INVARIANT_FIELD, None)
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "nothing"


@dataclasses.dataclass(frozen=True)
class BaseOperationConfig:
    """The fields of every configuration.

    Attributes:
        platform: Toolchain the call must run on, a `Platform` or a third party's own word; `"auto"` leaves it to
            dispatch.
        backend: Device kind the configuration was made for; `"any"` for all.
        call_argument_fields: Names of the fields that repeat arguments of the call or describe no kernel; kernels never
            see them.
        part_types: The type of each direction's part, where the configuration has parts.
    """

    call_argument_fields: ClassVar[frozenset[str]] = frozenset({"platform", "backend"})
    part_types: ClassVar[dict[str, type]] = {}

    platform: str = "auto"
    backend: Backend = "any"

    def part(self, direction: Direction) -> Any:
        """Returns the piece of this configuration that one direction's kernel reads (`None` when unset)."""
        return self

    def part_of(self, direction: Direction) -> Any:
        """Returns the same as `part`. A paired implementation, whose direction is `"both"`, reads the fields of the
        forward pass.
        """
        return self.part(piece(direction))

    @classmethod
    def from_parts(cls, forward: Any, backward: Any) -> Self:
        """Builds a configuration from what the two directions chose."""
        return forward

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain dictionaries, ready for JSON."""
        return msgspec.to_builtins(self)

    def to_json(self) -> str:
        """Returns JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Returns the inverse of `to_dict`.

        Raises:
            ValueError: A field has the wrong type (`msgspec.ValidationError`), or does not exist.
        """
        config = msgspec.convert(data, cls)
        unknown = sorted(_dotted_names(data) - _dotted_names(config.to_dict()))
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}")
        return config

    @classmethod
    def from_json(cls, s: str) -> Self:
        """Returns the inverse of `to_json`; errors as `from_dict`."""
        return cls.from_dict(msgspec.json.decode(s))


def as_part(argument: str, value: Any, part_type: type) -> Any:
    """Returns a configuration part as it is, or that of a dictionary.

    Raises:
        ValueError: The dictionary has a field that the part does not have, or a value of the wrong type.
    """
    if not isinstance(value, dict):
        return value
    unknown = sorted(str(name) for name in value if name not in {f.name for f in dataclasses.fields(part_type)})
    if unknown:
        raise ValueError(f"{argument}: {part_type.__name__} has no field {', '.join(unknown)}")
    try:
        return msgspec.convert(value, part_type)
    except msgspec.ValidationError as error:
        raise ValueError(f"{argument}: {error}") from None


def piece(direction: Direction) -> Direction:
    """Returns which piece of a configuration a direction reads. If one configuration serves both passes, this is the
    piece of the forward pass.
    """
    return "forward" if direction == "both" else direction


def _dotted_names(data: Any, prefix: str = "") -> set[str]:
    """Returns dotted names of everything in nested dictionaries."""
    if not isinstance(data, dict):
        return set()
    names = {f"{prefix}{name}" for name in data}
    return names.union(*(_dotted_names(value, f"{prefix}{name}.") for name, value in data.items()))
