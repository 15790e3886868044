"""Tables of measured configurations: the format of the user's store and of what ships inside backends."""

import functools
import importlib.resources
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.space import leaf_names

TABLE_FORMAT_VERSION = 1

# What decoding raises on damaged data: not JSON, not a table, not UTF-8, or nested too deeply.
DAMAGED_TABLE_ERRORS = (ValueError, RecursionError)


class StoreWarning(UserWarning):
    """A store or table cannot be used as it should; the call goes on without it."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One measured configuration.

    Attributes:
        config: The configuration part, as plain data.
        seconds: Median time a call took with it.
        measured_at: ISO 8601 time of the measurement, UTC.
        spread: Interquartile range of its samples, in seconds.
        samples: How many there were; 0 where that was not noted.
        predicted: Whether a model of the device gave the time, instead of a measurement. Never served as measured.
    """

    config: dict[str, Any]
    seconds: float
    measured_at: str = ""
    spread: float = 0.0
    samples: int = 0
    predicted: bool = False


class Table(msgspec.Struct, frozen=True):
    """The content of a store or of a shipped table, by key."""

    entries: Mapping[str, Entry]
    format: int = TABLE_FORMAT_VERSION


class _UncheckedTable(msgspec.Struct):
    """A table whose entries have yet to be looked at, one by one."""

    entries: dict[str, Any]


class _Format(msgspec.Struct):
    """The part of a table that has the same meaning in every version; any other value counts as another version."""

    format: Any = TABLE_FORMAT_VERSION


class OtherFormatError(OSError):
    """A table in a format of another version of ejkernel: neither damaged nor to be touched."""


def decode(data: bytes) -> Mapping[str, Entry]:
    """Returns the entries of a table; damaged entries are left out with a warning.

    Raises:
        ValueError: The data is not a table. The same RecursionError.
        OtherFormatError: The table has a format of another version.
    """
    # First, as another version may have no entries, or other ones.
    table_format = msgspec.json.decode(data, type=_Format).format
    if table_format != TABLE_FORMAT_VERSION:
        raise OtherFormatError(f"has format {table_format}, this version reads {TABLE_FORMAT_VERSION}")
    table = msgspec.json.decode(data, type=_UncheckedTable)
    entries: dict[str, Entry] = {}
    for key, raw in table.entries.items():
        try:
            entries[key] = msgspec.convert(raw, Entry)
        except msgspec.ValidationError as error:
            warnings.warn(f"a damaged entry is ignored: {key} ({error})", StoreWarning, stacklevel=2)
    return entries


def encode(table: Table) -> bytes:
    """Returns a table as text that people can read and compare."""
    return msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=1)


def entry_config_part(entry: Entry | None, part: type, entry_description: str) -> Any | None:
    """Returns the configuration part of an entry, or None. The key holds the schema's hash, so only edited files fail
    here; the warning says `entry_description`.
    """
    if entry is None:
        return None
    try:
        unknown = sorted({name for name, _ in flattened_fields(entry.config)} - leaf_names(part))
        if not unknown:
            return msgspec.convert(entry.config, part)
        problem = f"no field {', '.join(unknown)}"
    except ValueError as error:
        problem = str(error)
    warnings.warn(f"a damaged entry is ignored: {entry_description} ({problem})", StoreWarning, stacklevel=3)
    return None


def flattened_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of an entry and their values; those of a field that has fields of its own with a dot."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flattened_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def table_name(device: str, op_name: str) -> str:
    """Returns relative path of a shipped table: `NVIDIA_H200/flash_attention.json`."""
    return f"{device.replace(' ', '_').replace('/', '_')}/{op_name}.json"


def shipped_part(
    table_location: str | None,
    op_name: str,
    key: ConfigKey,
    part: type,
    kind: str | None = None,
    predicted: bool = False,
) -> Any | None:
    """Returns the part that a backend's own table has for `key`, or None.

    Args:
        table_location: `"package:folder"` from the implementation.
        op_name: Operation, which names the file.
        key: The call.
        part: Type of the configuration part.
        kind: What it has in common with the calls that share an entry, if there are others.
        predicted: Whether predictions are asked for, instead of measurements.
    """
    if table_location is None:
        return None
    name = table_name(key.device, op_name)
    entry = _shipped_table(table_location, name).get(key.as_shipped_key(kind))
    if entry is None or entry.predicted != predicted:
        return None
    return entry_config_part(entry, part, f"{table_location}/{name}, entry {key}")


@functools.cache
def _shipped_table(tuned: str, name: str) -> Mapping[str, Entry]:
    package, _, folder = tuned.partition(":")
    try:
        file = importlib.resources.files(package).joinpath(folder, *name.split("/"))
        return decode(file.read_bytes()) if file.is_file() else {}
    except (ImportError, OSError, *DAMAGED_TABLE_ERRORS) as error:
        warnings.warn(f"the table {tuned}/{name} is ignored: {error}", StoreWarning, stacklevel=2)
        return {}


__all__ = [
    "DAMAGED_TABLE_ERRORS",
    "TABLE_FORMAT_VERSION",
    "Entry",
    "OtherFormatError",
    "StoreWarning",
    "Table",
    "decode",
    "encode",
    "entry_config_part",
    "flattened_fields",
    "shipped_part",
    "table_name",
]
