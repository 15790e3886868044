"""Defines a group of commands that are imported only when they run, and to which other packages add commands."""

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Any, NamedTuple

import click

from ejkernel.suggestion import did_you_mean

COMMANDS_ENTRY_POINT_GROUP = "ejkernel.commands"


class LazyCommand(NamedTuple):
    """Describes a command that is imported when it runs or prints its own help.

    Attributes:
        name: What the user types.
        path: `"module:attribute"` of the `click.Command`.
        summary: The first line of the command's own help, which the group prints without importing the command.
    """

    name: str
    path: str
    summary: str


class PackageCommand(NamedTuple):
    """Describes a command of another package of this project, which an error can then name.

    Attributes:
        package: What to install.
        summary: The first line of the command's own help.
    """

    package: str
    summary: str


PACKAGE_COMMANDS = {
    "profile": PackageCommand("ejkernel-pallas[aot]", "Predict how fast a call's TPU kernels are, without a TPU."),
}


class CommandGroup(click.Group):
    """Holds the commands of the core and those of every installed distribution that declares some.

    A distribution declares a command by an entry point of the group `ejkernel.commands`: its name is what the user
    types, its object a `click.Command`. The command is imported when it runs or prints its own help, and never replaces
    a command of the core.
    """

    def __init__(self, *args: Any, lazy_commands: Iterable[LazyCommand] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = {one.name: one for one in lazy_commands}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists the names of all commands, without importing any."""
        return sorted({*self.lazy, *super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name; if it does not load, a command that fails and says why."""
        if cmd_name in self.lazy:
            module, _, attribute = self.lazy[cmd_name].path.partition(":")
            return getattr(importlib.import_module(module), attribute)
        known = super().get_command(ctx, cmd_name)
        entry_point = None if known is not None else _entry_points().get(cmd_name)
        return known if entry_point is None else _load_command(entry_point)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the user typed; the error for an unknown one names a package or a similar one."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            optional_command = PACKAGE_COMMANDS.get(name)
            if optional_command is not None:
                package = optional_command.package
                ctx.fail(f"the command {name!r} needs a package that is not installed: pip install '{package}'")
            ctx.fail(f"there is no command {name!r}{did_you_mean(name, {*names, *PACKAGE_COMMANDS})}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the name and the summary of each command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

    def summary(self, ctx: click.Context, name: str) -> str:
        """Returns one line that says what a command does, or which distribution adds it."""
        if name in self.lazy:
            return self.lazy[name].summary
        command = super().get_command(ctx, name)
        if command is not None:
            return command.get_short_help_str(limit=1000)
        source = _entry_point_source(_entry_points()[name])
        optional_command = PACKAGE_COMMANDS.get(name)
        if optional_command is not None and optional_command.package.partition("[")[0] == source:
            return optional_command.summary
        return f"A command of {source}; see `{ctx.command_path} {name} --help`."


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    entry_points = importlib.metadata.entry_points(group=COMMANDS_ENTRY_POINT_GROUP)
    return {entry_point.name: entry_point for entry_point in sorted(entry_points, key=lambda e: (e.name, e.value))}


def _entry_point_source(entry_point: importlib.metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else entry_point.value


def _load_command(entry_point: importlib.metadata.EntryPoint) -> click.Command:
    try:
        command = entry_point.load()
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and must not take others along
        return _broken_command(entry_point, f"{type(error).__name__}: {error}")
    if not isinstance(command, click.Command):
        return _broken_command(entry_point, f"its entry point is of type {type(command).__name__}, not a click.Command")
    return command


def _broken_command(entry_point: importlib.metadata.EntryPoint, reason: str) -> click.Command:
    message = f"the command {entry_point.name!r} of {_entry_point_source(entry_point)} does not load: {reason}"

    def raise_load_error() -> None:
        raise click.ClickException(message)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry_point.name, callback=raise_load_error, help=message, context_settings=settings)
