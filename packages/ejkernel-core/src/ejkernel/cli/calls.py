"""Reads the call that `explain`, `tune`, `bench` and `profile` are about from the command line.

The options follow from the operation's public signature: `--shape` describes the parameters that are annotated as
arrays, `-o` sets the others, and `--case` uses a named case of the operation. So an operation that a backend adds works
like those of the core.
"""

import ast
import dataclasses
import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

from ejkernel.cli.devices import find_devices
from ejkernel.cli.signatures import accepted_array_dtypes, literal_arguments, required_arrays
from ejkernel.ops.calls_file import read_calls
from ejkernel.ops.model import CALL_OPTIONS, Op
from ejkernel.ops.plugins import registry
from ejkernel.suggestion import did_you_mean
from ejkernel.types.arguments import non_default_fields, optional_fields

LITERAL_WORDS = {"true": True, "false": False, "none": None}
DEFAULT_DTYPE = "float32"
MAX_UNNAMED_SHAPE_ARRAYS = 3  # arrays that a single shape without a name describes: query, key and value
SHAPE_HELP = (
    "Shape of an array argument, with a dtype if you like: query=1,128,8,64:bfloat16. A single shape without a name is "
    "that of the first three required arrays, such as query, key and value. Several shapes without names are those of "
    "the required arrays, in order. Can be repeated."
)
KV_SHAPE_HELP = "Shape of key and value, if it is not that of the query."
VALUE_DIM_HELP = "Last dimension of value, if it is not that of key."
DTYPE_HELP = "Dtype of the floating-point arrays whose --shape names none.  [default: float32]"
PLATFORM_HELP = "Use only implementations of this platform: triton, pallas, cuda, xla, or that of another backend."
CASE_HELP = "Use one of the operation's named test cases instead of shapes and options."
OPTION_HELP = "Any other argument of the operation, such as -o causal=true or -o sliding_window=128. Can be repeated."


@dataclasses.dataclass(frozen=True)
class ShapeOption:
    """Holds one `--shape`: the name of the argument or None, its sizes, and its dtype or None."""

    name: str | None
    sizes: tuple[int, ...]
    dtype: str | None


def parse_shape(text: str) -> ShapeOption:
    """Reads `[NAME=]SIZES[:DTYPE]`, for example `query=1,128,8,64:bfloat16`; a scalar is `NAME=` without sizes."""
    name, named, sizes_and_dtype = text.rpartition("=")
    sizes, _, dtype = sizes_and_dtype.partition(":")
    parts = [] if name and not sizes.strip() else [size.strip() for size in sizes.split(",")]
    if not all(part.isdecimal() for part in parts) or (named and not name):
        raise click.BadParameter(f"got {text!r}, wants sizes with commas between them, such as 1,128,8,64")
    return ShapeOption(name.strip() or None, tuple(map(int, parts)), dtype_name(dtype) if dtype else None)


def find_operation(text: str) -> Op:
    """Looks up an operation; a dash counts as an underscore."""
    try:
        return registry().op(text.replace("-", "_"))
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("op: ")) from None


def complete_operation(ctx: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    """Completes the name of an operation, for a shell."""
    return sorted(name for name in registry().ops if name.startswith(text.replace("-", "_")))


def complete_case(ctx: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    """Completes the name of a case of the operation on the command line."""
    op = ctx.params.get("op")
    return [case.name for case in op.cases if case.name.startswith(text)] if isinstance(op, Op) else []


def dtype_name(text: str) -> str:
    """Checks that a dtype of this name exists, and returns its full name."""
    with suppress(TypeError, ValueError, SyntaxError):
        dtype = jnp.dtype(text)
        # `i4,f4`, `(2,3)f4`, `O` and `M8` are dtypes of NumPy alone.
        if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number):
            return _name_of_enabled(dtype)
    raise click.BadParameter(
        f"there is no dtype {text!r}; names are those of jax.numpy, such as float32, bfloat16 and int32"
    )


def _name_of_enabled(dtype: jnp.dtype[Any]) -> str:
    """Returns the name of a dtype; one that JAX would replace by another is refused."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise click.BadParameter(f"{dtype.name} needs 64-bit types in JAX: set JAX_ENABLE_X64=1")
    return dtype.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Holds one call of an operation.

    Attributes:
        op: The operation.
        label: What to call it in a table.
        abstract_args: Its argument record, with `jax.ShapeDtypeStruct` leaves.
        platform: The toolchain asked for, or None.
        make_args: PRNG key -> argument record with random data.
        mesh: With in_specs: it runs under `shard_map`.
        in_specs: Partition specs of its first arguments.
    """

    op: Op
    label: str
    abstract_args: Any
    platform: str | None
    make_args: Callable[[Any], Any]
    mesh: Any = None
    in_specs: Any = None


def calls_from_file(path: Path, op: Op | None) -> list[Call]:
    """Reads the calls of a file; only those of one operation if it is named.

    Raises:
        click.UsageError: The file is not a file of calls.
    """
    try:
        calls = read_calls(path)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--calls: {error}") from error
    return [
        Call(
            op=call.op,
            label=_call_label({name: getattr(call.args, name) for name in _names_of_set_arguments(call.args)}),
            abstract_args=call.args,
            platform=call.platform,
            make_args=functools.partial(call.op.make_inputs, call.args),
            mesh=call.mesh,
            in_specs=call.in_specs,
        )
        for call in calls
        if op in (None, call.op)
    ]


def _names_of_set_arguments(args: Any) -> list[str]:
    """Returns the names of the required arguments and of the arguments that differ from their default, in order."""
    field_names = {
        *non_default_fields(args),
        *({f.name for f in dataclasses.fields(args)} - optional_fields(args).keys()),
    }
    return [field.name for field in dataclasses.fields(args) if field.name in field_names]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Holds the options that describe a call, as the user typed them; None or empty where the user did not."""

    op: Op
    shapes: tuple[ShapeOption, ...]
    kv_shape: ShapeOption | None
    value_dim: int | None
    dtype: str | None
    platform: str | None
    options: tuple[str, ...]
    cases: tuple[str, ...]

    @property
    def are_shapes_described(self) -> bool:
        """Returns whether an option describes shapes, dtypes or other arguments."""
        return bool(self.shapes or self.kv_shape or self.value_dim or self.dtype or self.options)

    def calls(self, default_tag: str | None = None) -> list[Call]:
        """Returns the named cases as calls, or the call that the shapes describe.

        Args:
            default_tag: Tag of the cases to return without --shape and --case; None makes that an error.

        Raises:
            click.UsageError: The options describe no valid call of the operation.
        """
        if self.cases and self.are_shapes_described:
            raise click.UsageError("--case has its own shapes, dtypes and options; use either --case or the others")
        if self.are_shapes_described:
            return [self._call_from_shapes()]
        names = self.cases or tuple(c.name for c in self.op.cases if default_tag is not None and default_tag in c.tags)
        if not names:
            required = ", ".join(required_arrays(self.op))
            raise click.UsageError(f"--shape or --case is needed: {self.op.name} takes {required}")
        return [self._call_from_case(name) for name in names]

    def one(self) -> Call:
        """Returns the call; more than one is an error."""
        calls = self.calls()
        if len(calls) > 1:
            raise click.UsageError("--case can be used only once here")
        return calls[0]

    def call_with_size(self, axis_letters: tuple[str, ...], size: int) -> Call:
        """Returns the call that the shapes describe, with another size for some axes.

        Args:
            axis_letters: Axis letters, as the operation names its arguments' axes.
            size: Their size.

        Raises:
            click.UsageError: No given array has such an axis, or it is no valid call.
        """
        arrays = self._abstract_arrays()
        changed = {
            name: _shape_with_size(x, self.op.axes.get(name, "").split(), axis_letters, size)
            for name, x in arrays.items()
        }
        missing = [
            letter for letter in axis_letters if all(letter not in self.op.axes.get(n, "").split() for n in arrays)
        ]
        if missing:
            known = ", ".join(f"{name}[{self.op.axes[name]}]" for name in arrays if name in self.op.axes)
            raise click.UsageError(f"--sweep: no given array has an axis {', '.join(missing)}; there are {known}")
        return self._make_call(changed | self._option_values())

    def _call_from_case(self, name: str) -> Call:
        known = {case.name: case for case in self.op.cases}
        if name not in known:
            raise click.UsageError(_no_such_message(self.op, name, known, "case"))
        make = known[name].make
        abstract = jax.eval_shape(make, jax.random.key(0))
        return Call(op=self.op, label=name, abstract_args=abstract, platform=self.platform, make_args=make)

    def _call_from_shapes(self) -> Call:
        return self._make_call(self._abstract_arrays() | self._option_values())

    def _make_call(self, values: dict[str, Any]) -> Call:
        missing = [name for name in required_arrays(self.op) if name not in values]
        if missing:
            raise click.UsageError(f"{self.op.name} needs the shape of {', '.join(missing)}: --shape {missing[0]}=...")
        with one_line_errors():
            abstract = self.op.arguments(**values)
            self.op.validate(abstract)
        make = functools.partial(self.op.make_inputs, abstract)
        return Call(
            op=self.op, label=_call_label(values), abstract_args=abstract, platform=self.platform, make_args=make
        )

    def _abstract_arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = _shapes_by_argument(self.op, self.shapes)
        self._check_no_second_shape(shapes)
        if self.kv_shape is not None:
            shapes |= {name: self.kv_shape for name in ("key", "value")}
        if self.value_dim is not None and "value" in shapes:
            value = shapes["value"]
            shapes["value"] = dataclasses.replace(value, sizes=(*value.sizes[:-1], self.value_dim))
        elif self.value_dim is not None:
            raise click.UsageError("--value-dim: no shape of 'value' is given")
        dtypes = accepted_array_dtypes(self.op)
        for name in shapes:
            if name not in dtypes:
                raise click.UsageError(_no_such_message(self.op, name, dtypes, "array argument"))
        return {
            name: jax.ShapeDtypeStruct(shape.sizes, shape.dtype or self._default_dtype(dtypes[name]))
            for name, shape in shapes.items()
        }

    def _check_no_second_shape(self, shapes: dict[str, ShapeOption]) -> None:
        """Refuses `--kv-shape` and `--value-dim` of an array to which a `--shape` belongs alone."""
        alone = shapes.keys() if len([x for x in self.shapes if x.name is None]) > 1 else {x.name for x in self.shapes}
        if self.kv_shape is not None and self.kv_shape.name is not None:
            raise click.UsageError(f"--kv-shape: got the name {self.kv_shape.name!r}, wants the sizes of key and value")
        for option, value, names in (
            ("--kv-shape", self.kv_shape, ("key", "value")),
            ("--value-dim", self.value_dim, ("value",)),
        ):
            if value is not None and (twice := [name for name in names if name in alone]):
                raise click.UsageError(f"{option}: --shape has the shape of {' and '.join(twice)} already")

    def _default_dtype(self, accepted_dtypes: frozenset[str]) -> str:
        usual = self.dtype or DEFAULT_DTYPE
        return next((name for name in (usual, "int32", "bool") if name in accepted_dtypes), usual)

    def _option_values(self) -> dict[str, Any]:
        known, arrays = literal_arguments(self.op), accepted_array_dtypes(self.op)
        values: dict[str, Any] = {}
        for text in self.options:
            name, separator, value = text.partition("=")
            name = name.strip()
            if not separator:
                raise click.UsageError(f"-o: got {text!r}, wants NAME=VALUE")
            if name in arrays and name not in known:
                raise click.UsageError(f"-o: {name} of {self.op.name} is an array: --shape {name}=...")
            if name in CALL_OPTIONS:
                how = "use --platform" if name == "platform" else "it cannot be set on the command line"
                raise click.UsageError(f"-o: {name} is not an argument of the operation; {how}")
            if name not in known:
                raise click.UsageError(f"-o: {_no_such_message(self.op, name, known, 'option')}")
            if name in values:
                raise click.UsageError(f"-o: {name} is given twice")
            values[name] = parse_literal(value.strip())
        return values


def add_call_options(command: Callable[..., Any], *, required: bool = True) -> Callable[..., Any]:
    """Gives a command OP and the options that describe a call of it; it gets them as one `CallOptions`.

    Args:
        command: What it decorates.
        required: Whether OP is; without it the command gets None where it is left out.
    """

    @functools.wraps(command)
    def command_with_call_options(**options: Any) -> Any:
        _check_has_devices()
        call_options = {field.name: options.pop(field.name) for field in dataclasses.fields(CallOptions)}
        if call_options["op"] is None and any(call_options.values()):
            raise click.UsageError("give the operation, OP, that the options describe a call of")
        return command(None if call_options["op"] is None else CallOptions(**call_options), **options)

    metavar = "OP" if required else "[OP]"
    operation = click.argument(
        "op", required=required, metavar=metavar, type=find_operation, shell_complete=complete_operation
    )
    for decorate in (*reversed(_CALL_OPTION_DECORATORS), operation):
        command_with_call_options = decorate(command_with_call_options)
    return command_with_call_options


_CALL_OPTION_DECORATORS = (
    click.option("--shape", "shapes", type=parse_shape, metavar="[NAME=]SIZES[:DTYPE]", multiple=True, help=SHAPE_HELP),
    click.option("--kv-shape", type=parse_shape, metavar="SIZES", help=KV_SHAPE_HELP),
    click.option("--value-dim", type=click.IntRange(min=1), help=VALUE_DIM_HELP),
    click.option("--dtype", type=dtype_name, metavar="DTYPE", help=DTYPE_HELP),
    click.option("--platform", metavar="NAME", help=PLATFORM_HELP),
    click.option("-o", "--option", "options", metavar="NAME=VALUE", multiple=True, help=OPTION_HELP),
    click.option("--case", "cases", metavar="NAME", multiple=True, help=CASE_HELP, shell_complete=complete_case),
)


def parse_literal(text: str) -> Any:
    """Reads a value: a Python literal, true, false or none; any other text is the value itself."""
    if text.lower() in LITERAL_WORDS:
        return LITERAL_WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def one_line_errors() -> Generator[None]:
    """Turns the errors of a call that is wrong into usage errors, which click prints without a traceback."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _shape_with_size(
    x: jax.ShapeDtypeStruct, axes: list[str], axis_letters: tuple[str, ...], size: int
) -> jax.ShapeDtypeStruct:
    sizes = [size if axis in axis_letters else old for axis, old in zip(axes, x.shape, strict=False)]
    return jax.ShapeDtypeStruct((*sizes, *x.shape[len(sizes) :]), x.dtype)


def _shapes_by_argument(op: Op, shapes: tuple[ShapeOption, ...]) -> dict[str, ShapeOption]:
    named: dict[str, ShapeOption] = {}
    for shape in shapes:
        if shape.name is not None and named.setdefault(shape.name, shape) is not shape:
            raise click.UsageError(f"--shape: {shape.name} is given twice")
    bare = [shape for shape in shapes if shape.name is None]
    names = [name for name in required_arrays(op) if name not in named]
    if len(bare) > len(names):
        raise click.UsageError(f"--shape: got {len(bare)} without a name, {op.name} takes {', '.join(names) or 'none'}")
    if len(bare) == 1:
        bare = bare * min(MAX_UNNAMED_SHAPE_ARRAYS, len(names))
    return named | dict(zip(names, bare, strict=False))


def _no_such_message(op: Op, name: str, known_names: Any, kind: str) -> str:
    return f"{op.name} has no {kind} {name!r}{did_you_mean(name, known_names) or '; it has ' + ', '.join(known_names)}"


def _call_label(values: dict[str, Any]) -> str:
    shapes = [f"{n} {x.dtype.name}[{','.join(map(str, x.shape))}]" for n, x in values.items() if hasattr(x, "shape")]
    return ", ".join(shapes + [f"{name}={value}" for name, value in values.items() if not hasattr(value, "shape")])


def _check_has_devices() -> None:
    try:
        find_devices()
    except RuntimeError as error:
        raise click.ClickException(f"JAX found no device: {str(error).splitlines()[0]}") from error
