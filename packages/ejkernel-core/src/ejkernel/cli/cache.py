"""Implements `ejkernel cache`."""

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from ejkernel.cli.as_json import JSON_OPTION, print_json
from ejkernel.cli.tables import format_milliseconds, open_console, print_table
from ejkernel.cli.times import parse_iso_time, parse_time
from ejkernel.ops.config.persistent import PersistentCache, expand_store_path
from ejkernel.ops.config.table import (
    DAMAGED_TABLE_ERRORS,
    Entry,
    OtherFormatError,
    Table,
    decode,
    encode,
    flattened_fields,
)
from ejkernel.ops.json_text import json_error
from ejkernel.ops.plugins import registry
from ejkernel.suggestion import did_you_mean


def _check_store_path(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Returns the path of `--store` with the home directory for `~`."""
    try:
        return expand_store_path("--store", path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


STORE_OPTION = click.option(
    "--store",
    type=click.Path(path_type=Path),
    callback=_check_store_path,
    help="Path of the store: a .json file, or a directory that holds configs.json. The default is the user's store.",
)
FILE_TYPE = click.Path(dir_okay=False, path_type=Path)
TABLE_HEADINGS = ("operation", "implementation", "call", "configuration", "ms", "spread", "time (UTC)", "source")
BEFORE_HELP = (
    "Only entries older than this: an ISO 8601 date or time in UTC, such as 2026-11-20, or an age, such as 7d or 12h."
)
NUM_KEY_PARTS = 7  # of `str(ConfigKey)`; a store may hold entries of other versions
UNKNOWN_TIME = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryFilter:
    """Selects the stored entries that fit every option which the user gave.

    Attributes:
        op: Name of an operation.
        implementation: Name of an implementation.
        device: Device kind.
        before: Selects entries that were measured or predicted before this time. An entry without a time is not one.
        only_predicted: Whether to select only predictions.
    """

    op: str | None = None
    implementation: str | None = None
    device: str | None = None
    before: datetime.datetime | None = None
    only_predicted: bool = False

    @property
    def has_no_criteria(self) -> bool:
        """Says whether the user gave no option."""
        return self == EntryFilter()

    def selects(self, key: str, entry: Entry) -> bool:
        """Says whether the filter selects an entry; keys of other versions have no parts to compare."""
        parts = _key_parts(key)
        options = {"op": self.op, "implementation": self.implementation, "device": self.device}
        same = all(value is None or parts.get(name) == value for name, value in options.items())
        time = parse_iso_time(entry.measured_at)
        old = self.before is None or (time is not None and time < self.before)
        return same and old and (entry.predicted or not self.only_predicted)

    def check_known_names(self, entries: Mapping[str, Entry]) -> None:
        """Refuses an operation or an implementation that neither the store nor an installed backend has.

        Raises:
            click.UsageError: The name is a typo.
        """
        registered = registry()
        parts = [_key_parts(key) for key in entries]
        known = {
            "op": {*registered.ops, *(one["op"] for one in parts if "op" in one)},
            "implementation": {
                *(one.name for serving in registered.implementations.values() for one in serving),
                *(one["implementation"] for one in parts if "implementation" in one),
            },
        }
        for name, names in known.items():
            value = getattr(self, name)
            if value is not None and value not in names:
                what = "operation" if name == "op" else name
                raise click.UsageError(f"--{name}: there is no {what} {value!r}{did_you_mean(value, names)}")


def _key_parts(key: str) -> dict[str, str]:
    """Reads the operation, implementation, direction and device from a key, without versions."""
    names = ("op", "implementation", "direction", "device")
    return {name: part.split("@")[0] for name, part in zip(names, key.split(" | "), strict=False)}


def add_filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of an `EntryFilter`, which it gets as keyword arguments."""
    for decorate in (
        click.option("--predicted", "only_predicted", is_flag=True, help="Only predictions, not measurements."),
        click.option("--before", type=parse_time, metavar="TIME", help=BEFORE_HELP),
        click.option("--device", metavar="KIND", help="Only entries of this device kind, such as 'NVIDIA H200'."),
        click.option("--implementation", metavar="NAME", help="Only entries of this implementation."),
        click.option("--op", metavar="OP", help="Only entries of this operation."),
    ):
        command = decorate(command)
    return command


@click.group()
def cache() -> None:
    """Manage the store of tuned configurations."""


@cache.command()
@STORE_OPTION
def path(store: Path | None) -> None:
    """Print the path of the store."""
    click.echo(PersistentCache(path=store).path)


@cache.command(name="list")
@STORE_OPTION
@JSON_OPTION
def list_entries(store: Path | None, as_json: bool) -> None:
    """List the stored configurations, measurements first."""
    opened = PersistentCache(path=store)
    entries = _all(opened)
    ordered = _sort_entries(entries)
    if as_json:
        print_json({"path": str(opened.path), "entries": [_entry_to_dict(key, entry) for key, entry in ordered]})
    elif not entries:
        click.echo(f"no entries in {opened.path}")
    else:
        rows = [_entry_row(key, entry) for key, entry in ordered]
        print_table(
            open_console(),
            f"{_entry_count_text(len(rows))} in {opened.path}",
            *TABLE_HEADINGS,
            rows=rows,
            right_aligned_columns=["ms", "spread"],
        )


@cache.command()
@click.argument("file", type=FILE_TYPE)
@STORE_OPTION
@add_filter_options
def export(file: Path, store: Path | None, **options: Any) -> None:
    """Write stored configurations to FILE.

    `ejkernel cache import` reads the file on another machine.

    Entries that FILE already has are kept.
    """
    opened, chosen = PersistentCache(path=store), EntryFilter(**options)
    entries = _all(opened)
    chosen.check_known_names(entries)
    selected = {key: entry for key, entry in entries.items() if chosen.selects(key, entry)}
    if not selected:
        raise click.ClickException(f"{opened.path} has no such entries")
    merge_into_file(file, selected)
    click.echo(f"exported {_entry_count_text(len(selected))} to {file}")


@cache.command(name="import")
@click.argument("files", type=FILE_TYPE, nargs=-1, required=True)
@STORE_OPTION
def import_entries(files: tuple[Path, ...], store: Path | None) -> None:
    """Add the configurations of FILES to the store.

    If there are two entries for one call, the later measurement is kept. A prediction never replaces a measurement.
    """
    opened = PersistentCache(path=store)
    stored = _all(opened)
    merged = merge_tables(stored, *map(read_table, files))
    changed = {key: entry for key, entry in merged.items() if stored.get(key) != entry}
    _update_store(opened, changed)
    unwritten = changed.keys() - _all(opened).keys()
    if unwritten:
        raise click.ClickException(f"{opened.path} cannot be written")
    click.echo(f"imported {_entry_count_text(len(changed))} into {opened.path}")


@cache.command()
@click.argument("target", type=FILE_TYPE)
@click.argument("files", type=FILE_TYPE, nargs=-1, required=True)
def merge(target: Path, files: tuple[Path, ...]) -> None:
    """Add the configurations of FILES to the file TARGET.

    If there are two entries for one call, the later measurement is kept. A prediction never replaces a measurement.
    """
    count = merge_into_file(target, merge_tables(*map(read_table, files)))
    click.echo(f"{_entry_count_text(count)} in {target}")


@cache.command()
@STORE_OPTION
@add_filter_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove(store: Path | None, yes: bool, **options: Any) -> None:
    """Remove some stored configurations.

    Lists the entries that fit all the options, and asks before it removes them. `ejkernel cache clear` removes every
    entry.
    """
    opened, chosen = PersistentCache(path=store), EntryFilter(**options)
    if chosen.has_no_criteria:
        raise click.UsageError("give at least one of --op, --implementation, --device, --before and --predicted")
    entries = _all(opened)
    chosen.check_known_names(entries)
    selected = {key: entry for key, entry in entries.items() if chosen.selects(key, entry)}
    if not selected:
        click.echo(f"no such entries in {opened.path}")
        return
    rows = [_entry_row(*item) for item in _sort_entries(selected)]
    title = f"{len(selected)} of {_entry_count_text(len(entries))} of {opened.path} will be removed:"
    print_table(open_console(), title, *TABLE_HEADINGS, rows=rows, right_aligned_columns=["ms", "spread"])
    if not yes:
        click.confirm(f"Remove {_entry_count_text(len(selected))} from {opened.path}?", abort=True)
    for one in (opened, opened.predicted):
        if one.entries().keys() & selected.keys():
            one.remove(selected)
    if _all(opened).keys() & selected.keys():
        raise click.ClickException(f"{opened.path} cannot be written")
    click.echo(f"removed {_entry_count_text(len(selected))} from {opened.path}")


@cache.command()
@STORE_OPTION
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(store: Path | None, yes: bool) -> None:
    """Remove all stored configurations."""
    opened = PersistentCache(path=store)
    count = len(_all(opened))
    if not count:
        click.echo(f"no entries in {opened.path}")
        return
    if not yes:
        click.confirm(f"Remove {_entry_count_text(count)} from {opened.path}?", abort=True)
    try:
        opened.clear()
        opened.predicted.clear()
    except OSError as error:
        raise click.ClickException(f"{opened.path} cannot be removed: {error}") from error
    click.echo(f"removed {_entry_count_text(count)} from {opened.path}")


def merge_tables(*tables: Mapping[str, Entry]) -> dict[str, Entry]:
    """Merges tables: for each key it keeps measurements over predictions, then the later entry, then the first."""
    merged: dict[str, Entry] = {}
    for table in tables:
        for key, entry in table.items():
            known = merged.get(key)
            if known is None or _entry_rank(entry) > _entry_rank(known):
                merged[key] = entry
    return merged


def _entry_rank(entry: Entry) -> tuple[bool, datetime.datetime]:
    return not entry.predicted, parse_iso_time(entry.measured_at) or UNKNOWN_TIME


def _sort_entries(entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Sorts measurements before predictions, and then by key."""
    return sorted(entries.items(), key=lambda item: (item[1].predicted, item[0]))


def read_table(path: Path) -> Mapping[str, Entry]:
    """Reads the entries of a file.

    Raises:
        click.ClickException: The file cannot be read or is not a table.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    try:
        return decode(data)
    except DAMAGED_TABLE_ERRORS as error:
        reason = json_error(data) or str(error)
        raise click.ClickException(f"{path} is not a table of configurations: {reason}") from error
    except OtherFormatError as error:
        raise click.ClickException(f"{path} {error}") from error


def merge_into_file(path: Path, entries: Mapping[str, Entry]) -> int:
    """Adds entries to a table and replaces the file at once, without a lock file, which version control would see."""
    if path.exists() and not path.is_file():
        raise click.ClickException(f"{path} cannot be used: it is not a regular file")
    known = read_table(path) if path.exists() else {}
    merged = merge_tables(entries, known)
    path = Path(os.path.realpath(path))  # a link stays a link
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(encode(Table(merged)) + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be used: {error}") from error
    return len(merged)


def _entry_count_text(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _all(store: PersistentCache) -> dict[str, Entry]:
    """Returns measured and predicted entries."""
    return merge_tables(store.entries(), store.predicted.entries())


def _update_store(store: PersistentCache, entries: Mapping[str, Entry]) -> None:
    for one, predicted in ((store, False), (store.predicted, True)):
        chosen = {key: entry for key, entry in entries.items() if entry.predicted == predicted}
        if chosen:
            one.update(chosen)


def _entry_to_dict(key: str, entry: Entry) -> dict[str, Any]:
    """Converts an entry to plain data."""
    parts = key.split(" | ")
    names = ("operation", "implementation", "direction", "device", "schema", "call", "core")
    about: dict[str, Any] = dict(zip(names, parts, strict=True)) if len(parts) == NUM_KEY_PARTS else {}
    return {"key": key, **about, **msgspec.structs.asdict(entry)}


def _entry_row(key: str, entry: Entry) -> tuple[str, ...]:
    parts = key.split(" | ")
    config = "\n".join(f"{name}={value}" for name, value in flattened_fields(entry.config) if value is not None)
    about = ("", "", key)
    if len(parts) == NUM_KEY_PARTS:
        op, implementation, direction, device, _, call, _ = parts
        fields = [field for field in call.split() if not field.endswith("=None")]
        about = (f"{op}\n{direction}", f"{implementation}\non {device}", "\n".join(fields))
    times = format_milliseconds(entry.seconds), format_milliseconds(entry.spread) if entry.samples else "-"
    how = "predicted" if entry.predicted else "measured"
    return (*about, config, *times, entry.measured_at[:16].replace("T", " "), how)
