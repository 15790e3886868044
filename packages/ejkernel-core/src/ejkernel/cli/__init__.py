"""The `ejkernel` command. Nothing else in the library imports click, rich or matplotlib.

This module imports neither JAX nor a command, so that `ejkernel --help` is quick.
"""

import click

from ejkernel._version import __version__
from ejkernel.cli.groups import CommandGroup, LazyCommand

__all__ = ["main"]

COMMANDS = (
    LazyCommand("bench", "ejkernel.cli.bench:bench", "Time every implementation that supports a call."),
    LazyCommand("cache", "ejkernel.cli.cache:cache", "Manage the store of tuned configurations."),
    LazyCommand("demo", "ejkernel.cli.demo:demo", "Run flash attention on this machine and check the result."),
    LazyCommand("doctor", "ejkernel.cli.doctor:doctor", "Show versions, devices, backends and problems."),
    LazyCommand("explain", "ejkernel.cli.explain:explain", "Show which implementation a call would run, and why."),
    LazyCommand("ops", "ejkernel.cli.ops:ops", "List every operation and what its implementations support."),
    LazyCommand("tune", "ejkernel.cli.tune:tune", "Measure the configurations of a call and store the fastest."),
)


@click.group(
    cls=CommandGroup,
    lazy_commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ejkernel")
def main() -> None:
    """Show which kernel a call runs and why, tune it, and time it.

    Most commands take OP, the name of an operation such as flash_attention. `ejkernel doctor` lists the operations.
    """
