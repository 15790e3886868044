"""Writes calls to a file, so that they can be tuned in another process or on another machine: `ejkernel tune --calls
FILE`.

A file is JSON, `{"calls": [...]}`, made by `save_recorded` or by hand:

    {"op": "flash_attention", "platform": "triton",
     "arguments": {"query": "1,4096,16,128:bfloat16", "key": "1,4096,4,128:bfloat16", "value": "1,4096,4,128:bfloat16",
                   "causal": true, "sliding_window": [1023, 0]}}

An array is its sizes and its dtype. `mesh` holds the sizes of a mesh's axes by name and `in_specs` the partition specs,
for a call of which one shard is to be tuned.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from ejkernel.ops.json_text import json_error, line_number
from ejkernel.ops.model import Op
from ejkernel.ops.plugins import registry
from ejkernel.ops.recording import RecordedCall, get_recorded
from ejkernel.suggestion import did_you_mean
from ejkernel.types import MaskInfo

JSON_SCALAR_TYPES = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WrittenCall:
    """One call of a file.

    Attributes:
        op: The operation.
        args: Its argument record, with `jax.ShapeDtypeStruct` leaves.
        platform: The toolchain asked for, or None.
        mesh: With in_specs: what is tuned is one shard.
        in_specs: Partition specs of the first arguments.
    """

    op: Op
    args: Any
    platform: str | None = None
    mesh: Any = None
    in_specs: Any = None


def save_recorded(path: str | os.PathLike[str], calls: Iterable[RecordedCall] | None = None) -> int:
    """Writes recorded calls to a file for `ejkernel tune --calls`, and returns how many there are.

    Args:
        path: File; replaced if it is there.
        calls: Which; None for all that were recorded.

    Raises:
        ValueError: A call has an argument that cannot be written, such as a function.
    """
    written = [_call_to_json(call) for call in (get_recorded() if calls is None else calls)]
    data = msgspec.json.format(msgspec.json.encode({"calls": written}), indent=1)
    Path(path).write_bytes(data + b"\n")
    return len(written)


def read_calls(path: str | os.PathLike[str]) -> list[WrittenCall]:
    """Returns the calls of a file.

    Raises:
        ValueError: The file is not JSON of this form, or one of its calls is wrong; the message names the line.
        OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    problem = json_error(data)
    if problem is not None:
        raise ValueError(f"{path}, {problem}")
    try:
        calls = msgspec.json.decode(data, type=_ParsedFile).calls
    except msgspec.ValidationError as error:
        raise ValueError(f'{path}: wants {{"calls": [...]}}; {error}') from error
    written: list[WrittenCall] = []
    end = 0
    for number, text in enumerate(map(bytes, calls), 1):
        start = data.index(text, end)
        end = start + len(text)
        try:
            written.append(_call_from_json(msgspec.json.decode(text)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {line_number(data, start)}: call {number}: {error}") from error
    return written


class _ParsedFile(msgspec.Struct):
    """A file of calls; the text of a call is kept, so that an error can name its line."""

    calls: list[msgspec.Raw]


def _call_to_json(call: RecordedCall) -> dict[str, Any]:
    op: Op = call.plan.op
    values = {f.name: getattr(call.args, f.name) for f in dataclasses.fields(call.args)}
    arguments = {n: _value_to_json(f"{op.name}: {n}", v) for n, v in values.items() if v is not None}
    entry: dict[str, Any] = {"op": op.name, "arguments": arguments}
    if call.plan.platform not in (None, "auto"):
        entry["platform"] = call.plan.platform
    if call.mesh is not None:
        entry["mesh"] = dict(call.mesh.shape)
        entry["in_specs"] = [None if spec is None else list(spec) for spec in call.in_specs]
    return entry


def _value_to_json(name: str, value: Any) -> Any:
    """Returns a value as JSON: words that can be mistaken for nothing else where JSON has no such type."""
    if isinstance(value, JSON_SCALAR_TYPES):
        return value
    if isinstance(value, tuple | list):
        items: Iterable[Any] = value
        return [_value_to_json(name, item) for item in items]
    if isinstance(value, MaskInfo):
        leaves, fixed = value.tree_flatten_with_keys()
        return {"mask_info": [_value_to_json(name, leaf) for _, leaf in leaves], "fixed": list(fixed)}
    if isinstance(value, jax.lax.Precision):
        return {"precision": value.name}
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return {"dtype": jnp.dtype(value).name}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{','.join(map(str, value.shape))}:{jnp.dtype(value.dtype).name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
        if len(fields) == 1 and isinstance(fields[0], int):
            return fields[0]  # a number that is a part of the structure
    raise ValueError(f"{name}: got a {type(value).__name__}, which cannot be written to a file of calls")


def _call_from_json(call: Any) -> WrittenCall:
    _check_call_keys(call)
    op = registry().op(call["op"])
    args = _argument_record(op, {name: _value_from_json(value) for name, value in call["arguments"].items()})
    sizes, specs = call.get("mesh"), call.get("in_specs")
    return WrittenCall(
        op=op,
        args=args,
        platform=call.get("platform"),
        mesh=None if sizes is None else AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        in_specs=None if specs is None else tuple(map(_spec_from_json, specs)),
    )


def _check_call_keys(call: Any) -> None:
    """Refuses a call that is not written as the module says."""
    if not isinstance(call, dict):
        raise ValueError(f"got {call!r}, wants an object with the keys op and arguments")
    named: dict[str, Any] = call
    for name, kinds, words in _CALL_KEYS:
        value = named.get(name)
        if not isinstance(value, kinds):
            raise ValueError(f"{name}: got {value!r}, wants {words}")


def _argument_record(op: Op, values: dict[str, Any]) -> Any:
    """Returns the argument record of a call, validated."""
    fields = dataclasses.fields(op.arguments)
    known = [f.name for f in fields]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ValueError(f"{op.name} has no argument {', '.join(unknown)}{did_you_mean(unknown[0], known)}")
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{op.name} needs {', '.join(missing)}")
    args = op.arguments(**values)
    op.validate(args)
    return args


def _spec_from_json(entries: Any) -> Any:
    return None if entries is None else PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))


def _value_from_json(value: Any) -> Any:
    if isinstance(value, list):
        items: list[Any] = value
        return tuple(_value_from_json(item) for item in items)
    if isinstance(value, str):
        return _shape_from_text(value)
    if not isinstance(value, dict):
        return value
    named: dict[str, Any] = value
    for word, decode in _TAGGED_VALUE_READERS.items():
        if word in named:
            return decode(named)
    raise ValueError(f"got {named}, wants one of {', '.join(_TAGGED_VALUE_READERS)}")


def _shape_from_text(text: str) -> Any:
    """Returns a shape such as `1,64,2,16:bfloat16`, or `:int32` for a scalar; any other text is itself."""
    sizes, colon, dtype = text.rpartition(":")
    parts = sizes.split(",") if sizes else []
    if not colon or not all(part.strip().isdecimal() for part in parts):
        return text
    return jax.ShapeDtypeStruct(tuple(map(int, parts)), jnp.dtype(dtype))


def _mask_info_from_json(value: dict[str, Any]) -> MaskInfo:
    leaves = tuple(_value_from_json(leaf) for leaf in value["mask_info"])
    return MaskInfo.tree_unflatten(tuple(tuple(x) if isinstance(x, list) else x for x in value["fixed"]), leaves)


_CALL_KEYS: tuple[tuple[str, Any, str], ...] = (
    ("op", str, "the name of an operation"),
    ("arguments", dict, "an object of the arguments by name"),
    ("platform", (str, type(None)), "the name of a platform"),
    ("mesh", (dict, type(None)), "an object of sizes by the name of the axis"),
    ("in_specs", (list, type(None)), "a list of partition specs"),
)
_TAGGED_VALUE_READERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "mask_info": _mask_info_from_json,
    "precision": lambda value: jax.lax.Precision[value["precision"]],
    "dtype": lambda value: jnp.dtype(value["dtype"]),
}

__all__ = ["WrittenCall", "read_calls", "save_recorded"]
