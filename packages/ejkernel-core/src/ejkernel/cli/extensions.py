"""Commands that backends add to `ejkernel`, and finding them, which no broken backend can stop."""

import importlib.metadata

import click

GROUP = "ejkernel.commands"


class ExtensibleGroup(click.Group):
    """A group with the commands of every installed distribution that declares some, beside its own.

    A command is an entry point of the group `ejkernel.commands`: its name is what is typed, its object a
    `click.Command`. It is imported when it is called or described, and never replaces a command of the core.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, without importing any."""
        return sorted({*super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; where it does not load, one that says why."""
        known = super().get_command(ctx, cmd_name)
        entry_point = None if known is not None else _entry_points().get(cmd_name)
        return known if entry_point is None else _load(entry_point)


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found = importlib.metadata.entry_points(group=GROUP)
    return {entry_point.name: entry_point for entry_point in sorted(found, key=lambda e: (e.name, e.value))}


def _load(entry_point: importlib.metadata.EntryPoint) -> click.Command:
    try:
        command = entry_point.load()
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and must not take others along
        return _broken(entry_point, f"{type(error).__name__}: {error}")
    if not isinstance(command, click.Command):
        return _broken(entry_point, f"it is a {type(command).__name__}, wants click.Command")
    return command


def _broken(entry_point: importlib.metadata.EntryPoint, reason: str) -> click.Command:
    source = entry_point.dist.name if entry_point.dist else entry_point.value
    message = f"the command of {source} does not load: {reason}"

    def fail() -> None:
        raise click.ClickException(message)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry_point.name, callback=fail, help=message, context_settings=settings)
