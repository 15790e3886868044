"""Declares what the engine works with: operations and implementations, all as data."""

import dataclasses
import functools
import importlib
import importlib.resources
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from ejkernel.families.contract import Family
from ejkernel.ops.declared_types import FUNCTION, NAMES, TEXT, TEXTS, check_types
from ejkernel.ops.derived import axes_of, cases_of_uncovered_arrays, config_class_from_annotation, normal_inputs
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import BaseOperationConfig, Direction
from ejkernel.ops.space import NO_CHOICE, ConfigSpace
from ejkernel.ops.values import Conditions
from ejkernel.renamed import current_names
from ejkernel.types.arguments import optional_fields
from ejkernel.types.invariances import INVARIANCES

CALL_OPTIONS = ("platform", "cfg", "mesh", "in_specs", "out_specs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest accepted `|got - want|`: `atol + rtol * |want|`, element by element."""

    rtol: float
    atol: float


def tolerances(**errors: float | tuple[float, float]) -> dict[str, Tolerance]:
    """Returns dtype name -> tolerance.

    Args:
        **errors: For each dtype name one number, which is both `rtol` and `atol`, or the two.
    """
    pairs = {name: error if isinstance(error, tuple) else (error, error) for name, error in errors.items()}
    return {name: Tolerance(rtol=rtol, atol=atol) for name, (rtol, atol) in pairs.items()}


LONG_ROWS_TAG = "long rows"
"""The tag of cases in which rows have several splits, or blocks, of their keys in a `batch_invariant` block."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Named inputs of an operation.

    Attributes:
        name: Unique within the operation.
        make: PRNG key -> argument record.
        tags: Any of `"ci"`, `"awkward"`, `"bench"` and `"bench_cpu"` (timed there), and `LONG_ROWS_TAG`.
        exercises: Optional arguments of the family record this case is about; the conformance suite checks that
            dropping any of them changes the answer.
    """

    name: str
    make: Callable[[Any], Any]
    tags: frozenset[str] = frozenset({"ci"})
    exercises: frozenset[str] = frozenset()


def _unchanged_value(args: Any, value: Any) -> Any:
    return value


def _missing_function(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


TOLERANCE: Mapping[str, Tolerance] = tolerances(float64=(1e-9, 1e-10), float32=2e-5, bfloat16=2e-2, float16=3e-3)
"""The errors that an operation accepts unless it says others: those of softmax attention."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """An operation, declared once.

    Attributes:
        arguments: The argument record, an `ArgumentRecord` of the public function.
        family: The family that the operation lowers to.
        validate: Raises ValueError for a call that is wrong on every backend.
        lower: Argument record -> family record; plain differentiable jnp.
        cases: Input makers. An optional floating array that no case is about gets one, if its shape follows from the
            required arrays.
        axes: Axis letters of the positional arguments that differ from those of the annotations, in the family's
            letters. `Op.axes` has them all, in public order.
        function: The public function, whose signature is the contract; that of `arguments` unless given.
        name: The operation's id; the name of `function` unless given.
        config: Its configuration class; that of the annotation of `cfg` unless given.
        reference: Argument record -> output, in plain jnp at float32 (float64 when x64 is on); what the family's
            reference says of the lowered record unless given.
        tolerance: dtype name -> accepted error of outputs and gradients.
        make_inputs: (argument record of `jax.ShapeDtypeStruct`, PRNG key) -> valid concrete argument record; normal
            numbers unless given.
        axes_of: Argument record -> letters of such calls that differ from `axes`, also of `"output"`; None if none do.
        finish: (argument record, family output) -> what the public function returns.
        output: Axis letters of what the public function returns; None where they are the family's.
        lse: Axis letters of what `return_lse=True` puts after the first result; None where there is no such argument.
        configure: (argument record, `cfg=` or None) -> the call's own configuration, with what arguments that only
            tune the call ask for. Raises ValueError where the two disagree.
        route: (argument record, call options) -> the operation, the record and the options that carry the call out,
            where those are not its own; None where they always are.
        conditions: Argument record -> what the values of its integers have to satisfy; None where they may be any.
        padding_only: Whether segment ids of its records mark padding and nothing else. A row is then one request, and
            forward functions are given the record as it is: a pass over a cache would cost as much as the kernel.
        single_query: Whether a row of every call has one query: no call has a chunk of a prompt.
        conventions: Argument record -> sentences for `explain` on what a call means where libraries differ, or None.
        version: Raised when the meaning of a stored configuration changes.
    """

    arguments: type
    family: Family
    validate: Callable[[Any], object]
    lower: Callable[[Any], Any]
    cases: tuple[Case, ...]
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    function: Callable[..., Any] = _missing_function
    name: str = ""
    config: type[BaseOperationConfig] = BaseOperationConfig
    reference: Callable[[Any], Any] = _missing_function
    tolerance: Mapping[str, Tolerance] = dataclasses.field(default_factory=lambda: TOLERANCE)
    make_inputs: Callable[[Any, Any], Any] = normal_inputs
    finish: Callable[[Any, Any], Any] = _unchanged_value
    output: str | tuple[str, ...] | None = None
    lse: str | None = None
    configure: Callable[[Any, Any], Any] = _unchanged_value
    route: "Callable[[Any, dict[str, Any]], tuple[Op, Any, dict[str, Any]]] | None" = None
    axes_of: Callable[[Any], Mapping[str, Any]] | None = None
    conditions: Conditions | None = None
    padding_only: bool = False
    single_query: bool = False
    conventions: Callable[[Any], Iterable[str]] | None = None
    version: str = "1"

    def __post_init__(self) -> None:
        function = (
            getattr(self.arguments, "public_function", None) if self.function is _missing_function else self.function
        )
        if function is None:
            raise ValueError(f"function: got none, and {self.arguments.__name__} has its fields from no function")
        derived: dict[str, Any] = {"function": function, "axes": axes_of(function, self.axes)}
        derived["cases"] = (
            *self.cases,
            *cases_of_uncovered_arrays(function, optional_fields(self.family.record), self.cases),
        )
        derived["name"] = self.name or function.__name__
        derived["config"] = (
            config_class_from_annotation(function) if self.config is BaseOperationConfig else self.config
        )
        derived["reference"] = self._lowered_reference if self.reference is _missing_function else self.reference
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _lowered_reference(self, args: Any) -> Any:
        """Returns the result of the family's reference for a call."""
        return self.finish(args, self.family.reference(self.lower(args))[0])

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Returns the signature of the public function."""
        return inspect.signature(self.function)

    def returns_residual_lse(self, args: Any) -> bool:
        """Returns whether a call returns the lse among its family's residuals, and may be differentiated through it."""
        return self.family.lse is not None and getattr(args, "return_lse", False)

    def letters(self, args: Any) -> tuple[dict[str, str], str | tuple[str, ...] | None]:
        """Axis letters of a call's positional arguments, and of what it returns where they are not the family's."""
        special = {} if self.axes_of is None else dict(self.axes_of(args))
        output = special.pop("output", self.output)
        return {**self.axes, **special}, output

    def routed_call(self, args: Any, options: Mapping[str, Any]) -> "tuple[Op, Any, dict[str, Any]]":
        """Returns the operation, the record and all call options with which a call runs."""
        call_options = {name: options.get(name) for name in CALL_OPTIONS}
        return (self, args, call_options) if self.route is None else self.route(args, call_options)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Splits a call of the public function into its argument record and its call options.

        Raises:
            TypeError: Calling the function with these arguments would raise it too.
        """
        bound = self.signature.bind(*args, **current_names(self.function, kwargs)).arguments
        options = {name: bound.pop(name) for name in CALL_OPTIONS if name in bound}
        return self.arguments(**bound), options


def _no_refusal_reasons(record: Any) -> Iterable[str]:
    return ()


def _no_limits(record: Any, fields: frozenset[str]) -> Iterable[str]:
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requires:
    """The requirements of an implementation. A call with anything that is not granted here is refused.

    Attributes:
        devices: Any of `"cpu"`, `"gpu"`, `"nvidia"`, `"amd"`, `"tpu"`.
        modules: Top-level modules that must be installed, with the versions that will do: `"jax_triton>=0.3.1,<0.5"`.
        min_compute_capability: Lowest NVIDIA compute capability.
        dtypes: Names of the accepted dtypes.
        head_dims: Container of accepted head sizes (a set or a range); None accepts all.
        handles: Optional record fields it honours. A call that gives any other is refused by
            that name. And `"lse_cotangent"`, where its backward pass honours that of the `Pullback`.
        symbolic: Whether sizes may be symbolic, as they can be in `jax.export`.
        extra: Record -> sentences saying why it cannot be served; empty if it can. Never raises, and is not asked
            about symbolic sizes that are not accepted, nor, of kernels, about empty arrays: dispatch refuses those.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    handles: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    min_compute_capability: float | None = None
    head_dims: Container[int] | None = None
    symbolic: bool = False
    extra: Callable[[Any], Iterable[str]] = _no_refusal_reasons

    def __post_init__(self) -> None:
        check_types(self, "Requires", _TYPES_OF_REQUIRES)


_TYPES_OF_REQUIRES = {
    **dict.fromkeys(("devices", "dtypes", "handles"), NAMES),
    "modules": TEXTS,
    "min_compute_capability": (int, float, None),
    "extra": FUNCTION,
}
_TYPES_OF_IMPLEMENTATION = {
    **dict.fromkeys(("family", "name", "platform", "forward"), TEXT),
    **dict.fromkeys(("backward", "forward_mode", "row_states", "package", "cases"), (TEXT, None)),
    **dict.fromkeys(("gradients", "invariant_to"), NAMES),
    "only": (NAMES, None),
    "requires": Requires,
    "backward_requires": (Requires, None),
    "config": ConfigSpace,
    "priority": (int, FUNCTION),
    "priority_reason": (FUNCTION, None),
    **dict.fromkeys(("forward_mode_limits", "invariance_limits"), FUNCTION),
    "invariant_priority": (int, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """A registered kernel that computes the calls of a family, for all operations of the family.

    Attributes:
        family: The family's name; the registry lists the implementation for every operation that lowers to it.
        name: Unique among the implementations of an operation.
        platform: Toolchain: `"triton"`, `"pallas"`, `"cuda"` or `"xla"`, or a third party's own word.
        forward: `"module:function"`, called as `(record, config_part) -> (output, residuals)`, or `(output, residuals,
            private_residuals)` if `paired`: the residuals are the family's, and any backward of the family can use
            them; private residuals are any tree of arrays that only `backward` of the same implementation is given.
        requires: What the forward pass needs.
        config: Its configurations; those of a kernel with nothing to choose unless given.
        backward: `"module:function"`, called as `(Pullback, config_part) -> {field: gradient}`; None leaves the
            backward pass to another implementation of the same family. Unless `paired`, the forward pass of another
            implementation may have run.
        gradients: Record fields `backward` gives a gradient for.
        backward_requires: What the backward pass needs, where that differs.
        forward_mode: `"module:function"`, called as `(record, tangents, config_part) -> (results, their tangents)`,
            both `(output, residuals)`; `tangents` maps the name of each field that has tangents to them, in the field's
            structure. Of XLA, the function must be jnp that JAX can differentiate in forward mode. If None, another
            implementation gives the tangents.
        row_states: `"module:function"` of a recurrence, called as `(record, cotangent of the outputs, cotangent of the
            final states)`, of rows without initial states. If the first cotangent is None, it returns the final states
            of the rows; else the gradient of their initial states, where None as the second one means zeros. It returns
            None for a call that it does not serve.
        forward_mode_limits: `(record, names of the fields with tangents)` -> why `forward_mode` does not serve them.
        priority: Higher is tried first; ties go by name. Below XLA's, which is 0, it serves only callers that ask for
            its platform. A function of record, device and direction where it depends on the call.
        priority_reason: Record, device and direction -> the reason for that priority, which `explain` shows, or "".
        package: The package that ships what was measured; None for that of `forward`. Tables of tuned configurations
            are in its folder `tuned`, `<device kind>/<op>.json`. What the conformance suite found on devices is in its
            folder `evidence`, `<chip>/<name>.json`: on a GPU without, an implementation comes after all that are
            confirmed. Of a package without such a folder, priority alone decides.
        only: Names of the operations it serves; None for all. What a call cannot be served for belongs in `requires`.
        cases: `"module:function"` that returns more conformance cases by operation, `{"flash_attention": (...)}`, if
            those of the operations do not show all that the kernels do. The module imports without the toolchain.
        paired: The passes belong together: a differentiated call takes both or neither, and all calls share one
            configuration, which is asked for, measured and stored as direction `"both"`.
        invariant_to: Names of `ejkernel.types.invariances.INVARIANCES`: in a `batch_invariant` block, none of these
            changes a bit of a row of the forward pass. The conformance suite proves each on the device.
        invariance_limits: Record -> the reasons why `invariant_to` does not hold for it.
        invariant_priority: Its priority in a `batch_invariant` block, where that must not depend on the batch; None for
            a number. Required if `priority` is a function and `invariant_to` has names.
        instead_of_kernel: Kind of device -> why it serves the family there instead of a kernel, for the support matrix.
    """

    family: str
    name: str
    platform: str
    forward: str
    requires: Requires
    config: ConfigSpace = NO_CHOICE
    backward: str | None = None
    gradients: frozenset[str] = frozenset()
    backward_requires: Requires | None = None
    forward_mode: str | None = None
    row_states: str | None = None
    forward_mode_limits: Callable[[Any, frozenset[str]], Iterable[str]] = _no_limits
    priority: int | Callable[[Any, DeviceInfo, Direction], int] = 0
    priority_reason: Callable[[Any, DeviceInfo, Direction], str] | None = None
    package: str | None = None
    only: frozenset[str] | None = None
    cases: str | None = None
    paired: bool = False
    invariant_to: frozenset[str] = frozenset()
    invariance_limits: Callable[[Any], Iterable[str]] = _no_refusal_reasons
    invariant_priority: int | None = None
    instead_of_kernel: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        check_types(self, f"implementation {self.name!r}", _TYPES_OF_IMPLEMENTATION)
        if self.paired and self.backward is None:
            raise ValueError(f"implementation {self.name!r} of {self.family}: paired=True wants a backward, got None")
        unknown = sorted(self.invariant_to - INVARIANCES.keys())
        if unknown:
            raise ValueError(f"invariant_to: got {', '.join(unknown)}, wants names among {', '.join(INVARIANCES)}")
        if self.invariant_to and self.config is not NO_CHOICE and self.config.batch_invariant is None:
            raise ValueError(f"invariant_to: {self.name!r} of {self.family} wants a rule ConfigSpace.batch_invariant")
        if self.invariant_to and callable(self.priority) and self.invariant_priority is None:
            raise ValueError(
                f"invariant_priority: {self.name!r} of {self.family} has a priority for each call, got None"
            )

    @property
    def backend(self) -> str:
        """Returns the kind of device it runs on: `"gpu"`, `"tpu"`, `"cpu"`, or `"any"` if there are several."""
        kinds = {"gpu" if name in ("nvidia", "amd") else name for name in self.requires.devices}
        return kinds.pop() if len(kinds) == 1 else "any"

    @property
    def tuned(self) -> str | None:
        """Returns the folder of the shipped tables, `"package:tuned"`; None if the package ships no tables."""
        return _shipped_folder(self.package or self.forward.partition(".")[0], "tuned")

    @property
    def evidence(self) -> str | None:
        """Returns the folder of the evidence, `"package:evidence"`; None if the implementation needs no evidence."""
        return _shipped_folder(self.package or self.forward.partition(".")[0], "evidence")

    def serves(self, op: Op) -> bool:
        """Returns whether it is registered for an operation."""
        return op.family.name == self.family and (self.only is None or op.name in self.only)

    def cases_of(self, op: Op) -> tuple[Case, ...]:
        """Returns its own conformance cases of an operation, in addition to the operation's."""
        return () if self.cases is None else _cases_by_operation(self.cases).get(op.name, ())

    def requires_for(self, direction: Direction) -> Requires:
        """Returns the requirements of one direction."""
        return self.backward_requires or self.requires if direction == "backward" else self.requires

    def priority_for(self, record: Any, device: DeviceInfo, direction: Direction = "forward") -> int:
        """Returns the priority of the implementation for one direction of a call."""
        return self.priority(record, device, direction) if callable(self.priority) else self.priority

    @property
    def constant_priority(self) -> int | None:
        """Returns the priority of the implementation for every call; None if it depends on the call."""
        return None if callable(self.priority) else self.priority

    def function(self, direction: Direction) -> Callable[[Any, Any], Any]:
        """Imports and returns the function of one direction."""
        path = self.backward if direction == "backward" else self.forward
        if path is None:
            raise ValueError(f"implementation {self.name!r} of {self.family} has no {direction} function")
        return load_object(path)


@functools.cache
def _shipped_folder(package: str, name: str) -> str | None:
    """Returns a folder of a package as `"package:folder"`; None where there is none."""
    try:
        exists = importlib.resources.files(package).joinpath(name).is_dir()
    except (ImportError, TypeError, ValueError):  # there is no such package, or it is a module
        return None
    return f"{package}:{name}" if exists else None


@functools.cache
def _cases_by_operation(path: str) -> dict[str, tuple[Case, ...]]:
    """Returns the cases that a `"module:function"` gives, the same objects each time: what is traced is cached."""
    return {name: tuple(cases) for name, cases in load_object(path)().items()}


@functools.cache
def load_object(path: str) -> Any:
    """Resolves `"module:attribute"`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
