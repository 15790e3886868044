"""`ejkernel cache`."""

from pathlib import Path

import click

from ejkernel.cli.tables import console, milliseconds, print_table
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.table import Entry, leaves

STORE = click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="A .json file, or a directory that holds configs.json; the user's store if left out.",
)
HEADINGS = ("operation", "implementation", "call", "configuration", "ms", "measured, UTC")
KEY_PARTS = 7  # of `str(ConfigKey)`; a store may hold entries of other versions


@click.group()
def cache() -> None:
    """Look after the store of tuned configurations."""


@cache.command()
@STORE
def path(store: Path | None) -> None:
    """Print where the store is."""
    click.echo(PersistentCache(store).path)


@cache.command(name="list")
@STORE
def list_entries(store: Path | None) -> None:
    """List the stored configurations."""
    opened = PersistentCache(store)
    entries = opened.entries()
    if not entries:
        click.echo(f"no entries in {opened.path}")
        return
    rows = [_row(key, entry) for key, entry in sorted(entries.items())]
    print_table(console(), f"{len(rows)} in {opened.path}", *HEADINGS, rows=rows, right=["ms"])


@cache.command()
@STORE
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(store: Path | None, yes: bool) -> None:
    """Remove all stored configurations."""
    opened = PersistentCache(store)
    count = len(opened.entries())
    if not count:
        click.echo(f"no entries in {opened.path}")
        return
    if not yes:
        click.confirm(f"Remove {count} from {opened.path}?", abort=True)
    try:
        opened.clear()
    except OSError as error:
        raise click.ClickException(f"{opened.path} cannot be removed: {error}") from error
    click.echo(f"removed {count} from {opened.path}")


def _row(key: str, entry: Entry) -> tuple[str, ...]:
    parts = key.split(" | ")
    config = "\n".join(f"{name}={value}" for name, value in leaves(entry.config) if value is not None)
    about = ("", "", key)
    if len(parts) == KEY_PARTS:
        op, implementation, direction, device, _, call, _ = parts
        given = [field for field in call.split() if not field.endswith("=None")]
        about = (f"{op}\n{direction}", f"{implementation}\non {device}", "\n".join(given))
    return (*about, config, milliseconds(entry.seconds), entry.measured_at[:16].replace("T", " "))
