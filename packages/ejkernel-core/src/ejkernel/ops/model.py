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
    """A record type that several operations lower to and that backends implement.

    Attributes:
        name: Readable name.
        record: The `@arguments` class.
        differentiable: Record fields that have a gradient.
        dtype: The dtype `Requires.dtypes` is about.
        head_dims: The sizes `Requires.head_dims` is about.
        axes: Axis letters of every array field of the record, and of `"output"`: `{"query": "b t h d", ...}`. A tuple
            of letters where the output is a tuple.
        shardable: Letters that may be split over mesh axes.
        aligned: Pairs of letters that must be split alike (query heads with KV heads).
        localise: `(record, offsets) -> record` makes one shard's record mean its part of the global call;
            `offsets` maps each letter to the global index of the shard's first element.
        reference: record -> (output, residuals), their meaning in plain jnp at float32 (float64 when x64 is on).
    """

    name: str
    record: type
    differentiable: tuple[str, ...]
    dtype: Callable[[Any], Any]
    head_dims: Callable[[Any], tuple[int, ...]]
    axes: Mapping[str, Any]
    shardable: str
    aligned: tuple[tuple[str, str], ...]
    localise: Callable[[Any, Mapping[str, Any]], Any]
    reference: Callable[[Any], tuple[Any, Any]]


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
        finish: (argument record, family output) -> what the public function returns.
        output: Axis letters of what the public function returns; None where they are the family's.
        configure: (argument record, `cfg=` or None) -> the call's own configuration, with what arguments that only
            tune the call ask for. Raises ValueError where the two disagree.
        variant: Argument record -> the operation as it is for such calls, where letters or family depend on their
            ranks; None where they never do.
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
    variant: Callable[[Any], "Op"] | None = None
    route: "Callable[[Any, dict[str, Any]], tuple[Op, Any, dict[str, Any]]] | None" = None
    version: str = "1"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Of the public function."""
        return inspect.signature(self.function)

    def of(self, args: Any) -> "Op":
        """The operation as it is for a call with these arguments."""
        return self if self.variant is None else self.variant(args)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigSpace:
    """The configurations of an implementation.

    Attributes:
        reads: Names of the configuration fields its kernels look at.
        heuristic: (record, device, direction) -> complete configuration part, by rule.
        candidates: (record, device, direction) -> configuration parts worth measuring.
        kind: Record -> what it has in common with the calls that share an entry of a shipped table; None where only
            calls of the same shapes do.
    """

    reads: frozenset[str]
    heuristic: Callable[[Any, DeviceInfo, Direction], Any]
    candidates: Callable[[Any, DeviceInfo, Direction], tuple[Any, ...]]
    kind: Callable[[Any], str | None] = _of_no_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        op: The operation's name.
        name: Unique among the implementations of the operation.
        platform: Toolchain: `"triton"`, `"pallas"`, `"cuda"` or `"xla"`, or a third party's own word.
        backend: Device kind it is made for: `"gpu"`, `"tpu"`, `"cpu"` or `"any"`.
        forward: `"module:function"`, called as `(record, config_part) -> (output, residuals)`.
        requires: What the forward pass needs.
        config: Its configurations.
        backward: `"module:function"`, called as `(Pullback, config_part) -> {field: gradient}`; None leaves the
            backward pass to another implementation of the same family.
        gradients: Record fields `backward` gives a gradient for.
        backward_requires: What the backward pass needs, where that differs.
        priority: Higher is tried first; ties go by name.
        tuned: `"package:folder"` of shipped tables, `<device kind>/<op>.json` in it.
    """

    op: str
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

    def requires_for(self, direction: Direction) -> Requires:
        """The requirements of one direction."""
        return self.backward_requires or self.requires if direction == "backward" else self.requires

    def function(self, direction: Direction) -> Callable[[Any, Any], Any]:
        """Imports and returns the function of one direction."""
        path = self.backward if direction == "backward" else self.forward
        if path is None:
            raise ValueError(f"implementation {self.name!r} of {self.op} has no {direction} function")
        return load_object(path)


@functools.cache
def load_object(path: str) -> Any:
    """Resolves `"module:attribute"`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
