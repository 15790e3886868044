"""What the engine is told: operations, families and implementations, all as data."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from ejkernel.ops.config.params import BaseOperationConfig, Direction
from ejkernel.ops.device import DeviceInfo

CALL_OPTIONS = ("platform", "cfg", "mesh", "in_specs", "out_specs")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A contract that several operations lower to and that backends implement: record, output and residuals.

    An operation that needs other outputs or residuals is another family, though its record may be the same.

    Attributes:
        name: What implementations name it by, unique among the registered operations' families.
        record: The `@arguments` class.
        differentiable: Record fields that have a gradient.
        dtype: The dtype `Requires.dtypes` is about.
        head_dims: The sizes `Requires.head_dims` is about.
        axes: Axis letters of every array field of the record, and of `"output"`: `{"query": "b t h d", ...}`, with a
            tuple of letters where the output is a tuple. A function of the record where they follow from it.
        shardable: Letters that may be split over mesh axes; likewise.
        aligned: Pairs of letters that must be split alike (query heads with KV heads), where both may be split.
        localise: `(record, offsets) -> record` makes one shard's record mean its part of the global call;
            `offsets` maps each letter to the global index of the shard's first element.
        reference: record -> (output, residuals), their meaning in plain jnp at float32 (float64 when x64 is on).
    """

    name: str
    record: type
    differentiable: tuple[str, ...]
    dtype: Callable[[Any], Any]
    head_dims: Callable[[Any], tuple[int, ...]]
    axes: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
    shardable: str | Callable[[Any], str]
    aligned: tuple[tuple[str, str], ...]
    localise: Callable[[Any, Mapping[str, Any]], Any]
    reference: Callable[[Any], tuple[Any, Any]]

    def axes_of(self, record: Any) -> Mapping[str, Any]:
        """The axis letters of a record's fields and of `"output"`."""
        return self.axes(record) if callable(self.axes) else self.axes

    def shardable_of(self, record: Any) -> str:
        """The letters of a record that may be split."""
        return self.shardable(record) if callable(self.shardable) else self.shardable

    def aligned_of(self, record: Any) -> tuple[tuple[str, str], ...]:
        """The pairs of letters of a record that must be split alike."""
        letters = self.shardable_of(record)
        return tuple(pair for pair in self.aligned if pair[0] in letters and pair[1] in letters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest accepted `|got - want|`: `atol + rtol * |want|`, element by element."""

    rtol: float
    atol: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Named inputs of an operation.

    Attributes:
        name: Unique within the operation.
        make: PRNG key -> argument record.
        tags: Any of `"ci"`, `"awkward"`, `"bench"`.
        exercises: Optional arguments of the family record this case is about; the conformance suite checks that
            dropping any of them changes the answer.
    """

    name: str
    make: Callable[[Any], Any]
    tags: frozenset[str] = frozenset({"ci"})
    exercises: frozenset[str] = frozenset()


def _as_it_is(args: Any, value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """An operation, declared once.

    Attributes:
        name: The operation's id.
        function: The public function; its signature is the contract, `arguments` mirrors it.
        arguments: The argument record.
        family: What it lowers to.
        config: Its configuration class.
        validate: Raises ValueError for a call that is wrong on every backend.
        lower: Argument record -> family record; plain differentiable jnp.
        reference: Argument record -> output, in plain jnp at float32 (float64 when x64 is on).
        cases: Input makers.
        tolerance: dtype name -> accepted error of outputs and gradients.
        make_inputs: (argument record of `jax.ShapeDtypeStruct`, PRNG key) -> valid concrete argument record.
        axes: Axis letters of the positional arguments, in public order, in the family's letters.
        axes_of: Argument record -> those letters that differ from `axes` for such calls, `"output"` among them; None
            where they never do.
        finish: (argument record, family output) -> what the public function returns.
        output: Axis letters of what the public function returns; None where they are the family's.
        configure: (argument record, `cfg=` or None) -> the call's own configuration, with what arguments that only
            tune the call ask for. Raises ValueError where the two disagree.
        route: (argument record, call options) -> the operation, the record and the options that carry the call out,
            where those are not its own; None where they always are.
        version: Raised when the meaning of a stored configuration changes.
    """

    name: str
    function: Callable[..., Any]
    arguments: type
    family: Family
    config: type[BaseOperationConfig]
    validate: Callable[[Any], None]
    lower: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    cases: tuple[Case, ...]
    tolerance: Mapping[str, Tolerance]
    make_inputs: Callable[[Any, Any], Any]
    axes: Mapping[str, str]
    finish: Callable[[Any, Any], Any] = _as_it_is
    output: str | tuple[str, ...] | None = None
    configure: Callable[[Any, Any], Any] = _as_it_is
    route: "Callable[[Any, dict[str, Any]], tuple[Op, Any, dict[str, Any]]] | None" = None
    axes_of: Callable[[Any], Mapping[str, Any]] | None = None
    version: str = "1"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Of the public function."""
        return inspect.signature(self.function)

    def letters(self, args: Any) -> tuple[dict[str, str], str | tuple[str, ...] | None]:
        """Axis letters of a call's positional arguments, and of what it returns where they are not the family's."""
        special = {} if self.axes_of is None else dict(self.axes_of(args))
        output = special.pop("output", self.output)
        return {**self.axes, **special}, output

    def routed(self, args: Any, options: Mapping[str, Any]) -> "tuple[Op, Any, dict[str, Any]]":
        """The operation, the record and the call options, each of them, that carry a call out."""
        given = {name: options.get(name) for name in CALL_OPTIONS}
        return (self, args, given) if self.route is None else self.route(args, given)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Splits a call of the public function into its argument record and its call options.

        Raises:
            TypeError: As calling the function with these arguments would.
        """
        bound = self.signature.bind(*args, **kwargs).arguments
        options = {name: bound.pop(name) for name in CALL_OPTIONS if name in bound}
        return self.arguments(**bound), options


def _no_reasons(record: Any) -> Iterable[str]:
    return ()


def _of_no_kind(record: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requires:
    """What an implementation needs; everything not granted here is refused.

    Attributes:
        devices: Any of `"cpu"`, `"gpu"`, `"nvidia"`, `"amd"`, `"tpu"`.
        modules: Top-level modules that must be installed.
        min_compute_capability: Lowest NVIDIA compute capability.
        dtypes: Names of the accepted dtypes.
        head_dims: Container of accepted head sizes (a set or a range); None accepts all.
        handles: Optional record fields it honours. A call that gives any other is refused by that name.
        extra: Record -> sentences saying why it cannot be served; empty if it can. Never raises.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    handles: frozenset[str]
    modules: tuple[str, ...] = ()
    min_compute_capability: float | None = None
    head_dims: Container[int] | None = None
    extra: Callable[[Any], Iterable[str]] = _no_reasons


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ConfigSpace:
    """The configurations of an implementation.

    A kernel declares frozen configuration types of its own, one a direction, whose fields are named for what they are
    in that kernel. Its functions, rules, the store and shipped tables use these types; `faces` says which public fields
    they are set by. A call that sets another public field is refused by that name. Without a type of its own, a kernel
    is given the operation's public configuration, and `reads` says which of its fields it looks at.

    Attributes:
        reads: Names of the public configuration fields its kernels look at, where it declares no type of its own.
        heuristic: (record, device, direction) -> complete configuration part, by rule.
        candidates: (record, device, direction) -> configuration parts worth measuring.
        kind: Record -> what it has in common with the calls that share an entry of a shipped table; None where only
            calls of the same shapes do.
        forward: The type of the forward pass, or of both where they are paired; None for the public configuration.
        backward: The type of the backward pass, where that is another.
        faces: Public configuration field -> field of the kernel's own types that has its value.
    """

    heuristic: Callable[[Any, DeviceInfo, Direction], Any]
    candidates: Callable[[Any, DeviceInfo, Direction], tuple[Any, ...]]
    kind: Callable[[Any], str | None] = _of_no_kind
    reads: frozenset[str] = frozenset()
    forward: type | None = None
    backward: type | None = None
    faces: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], hash=False)

    def own_type(self, direction: Direction) -> type | None:
        """The kernel's own type of one direction; None where it is given the public configuration."""
        return (self.backward or self.forward) if direction == "backward" else self.forward

    def translated(self, part: Any, direction: Direction) -> dict[str, Any]:
        """What a public part, or one of the kernel's own, sets: the kernel's fields and their values."""
        own = self.own_type(direction)
        given = _given(part)
        if own is None or isinstance(part, own):
            return given
        faces = self._faces(own)
        return {faces[name]: value for name, value in given.items() if name in faces}

    def unread(self, part: Any, direction: Direction) -> list[str]:
        """The fields that a public part sets and that the kernel does not have."""
        own = self.own_type(direction)
        if own is not None and isinstance(part, own):
            return []
        read = self.reads if own is None else self._faces(own).keys()
        return sorted(_given(part).keys() - read - {"platform", "backend"})

    def public(self, config: type[BaseOperationConfig], forward: Any, backward: Any) -> Any:
        """The public configuration of what the two directions chose.

        A part that the public fields cannot express is held as it is by classes that have a part for each direction.
        """
        return config.from_parts(self.shown(config, forward, "forward"), self.shown(config, backward, "backward"))

    def shown(self, config: type[BaseOperationConfig], part: Any, direction: Direction) -> Any:
        """A part in the public fields; as it is where they cannot express it and the public class can hold it."""
        own = self.own_type(direction)
        if own is None or not isinstance(part, own):
            return part
        face = config.part_types.get(direction, config)
        has = {field.name for field in dataclasses.fields(face)}
        names = {field: name for name, field in self._faces(own).items() if name in has}
        values = _given(part)
        shown = {names[name]: value for name, value in values.items() if name in names}
        return part if direction in config.part_types and len(shown) < len(values) else face(**shown)

    def _faces(self, own: type) -> dict[str, str]:
        has = {field.name for field in dataclasses.fields(own)}
        return {face: field for face, field in self.faces.items() if field in has}


def _given(part: Any) -> dict[str, Any]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the calls of a family, whichever operation they are of.

    Attributes:
        family: The family's name; the registry lists the implementation for every operation that lowers to it.
        name: Unique among the implementations of an operation.
        platform: Toolchain: `"triton"`, `"pallas"`, `"cuda"` or `"xla"`, or a third party's own word.
        backend: Device kind it is made for: `"gpu"`, `"tpu"`, `"cpu"` or `"any"`.
        forward: `"module:function"`, called as `(record, config_part) -> (output, residuals)`, or `(output, residuals,
            pocket)`: the residuals are the family's, and any backward of the family can use them; the pocket is any
            tree of arrays that only `backward` of the same implementation is given, as `Pullback.pocket`.
        requires: What the forward pass needs.
        config: Its configurations.
        backward: `"module:function"`, called as `(Pullback, config_part) -> {field: gradient}`; None leaves the
            backward pass to another implementation of the same family. Unless `paired`, it must do without a pocket,
            for the forward pass of another implementation may have run.
        gradients: Record fields `backward` gives a gradient for.
        backward_requires: What the backward pass needs, where that differs.
        priority: Higher is tried first; ties go by name.
        tuned: `"package:folder"` of shipped tables, `<device kind>/<op>.json` in it.
        only: Names of the operations it serves; None for all of the family. For exceptions: what a call cannot be
            served for belongs in `requires`.
        cases: `"module:function"` that returns further conformance cases by operation, `{"flash_attention": (...)}`;
            None where those of the operations show all that the kernels do.
        paired: The passes belong together: a differentiated call takes both or neither, and they share one
            configuration, which is asked for, measured and stored as direction `"both"`. Calls that are not
            differentiated use that configuration too.
    """

    family: str
    name: str
    platform: str
    backend: str
    forward: str
    requires: Requires
    config: ConfigSpace
    backward: str | None = None
    gradients: frozenset[str] = frozenset()
    backward_requires: Requires | None = None
    priority: int = 0
    tuned: str | None = None
    only: frozenset[str] | None = None
    cases: str | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        if self.paired and self.backward is None:
            raise ValueError(f"implementation {self.name!r} of {self.family}: paired=True wants a backward, got None")

    def serves(self, op: Op) -> bool:
        """Whether it is registered for the calls of an operation."""
        return op.family.name == self.family and (self.only is None or op.name in self.only)

    def cases_of(self, op: Op) -> tuple[Case, ...]:
        """Its own conformance cases of an operation, beside the operation's."""
        return () if self.cases is None else tuple(load_object(self.cases)().get(op.name, ()))

    def requires_for(self, direction: Direction) -> Requires:
        """The requirements of one direction."""
        return self.backward_requires or self.requires if direction == "backward" else self.requires

    def function(self, direction: Direction) -> Callable[[Any, Any], Any]:
        """Imports and returns the function of one direction."""
        path = self.backward if direction == "backward" else self.forward
        if path is None:
            raise ValueError(f"implementation {self.name!r} of {self.family} has no {direction} function")
        return load_object(path)


@functools.cache
def load_object(path: str) -> Any:
    """Resolves `"module:attribute"`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
