"""The `ejkernel` command. Nothing else in the library imports click, rich or matplotlib."""

import click

from ejkernel._version import __version__
from ejkernel.cli import bench, cache, demo, doctor, explain, ops, tune
from ejkernel.cli.extensions import ExtensibleGroup

__all__ = ["main"]


@click.group(cls=ExtensibleGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ejkernel")
def main() -> None:
    """See which kernel a call runs and why, tune it, time it.

    OP is an operation such as flash_attention; `ejkernel doctor` lists them.
    """


for _command in (doctor.doctor, explain.explain, ops.ops, tune.tune, cache.cache, bench.bench, demo.demo):
    main.add_command(_command)
