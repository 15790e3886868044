"""The command `ejkernel profile`, which this package adds to ejkernel-core's command line."""

import importlib.util
from pathlib import Path

import click
import jax

from ejkernel.cli.calls import CallOptions, add_call_options, one_line_errors
from ejkernel.cli.tables import open_console
from ejkernel_pallas.tpu.profile.cases import Case
from ejkernel_pallas.tpu.profile.chips import CHIPS
from ejkernel_pallas.tpu.profile.jobs import profile_many
from ejkernel_pallas.tpu.profile.operation import make_profile_case
from ejkernel_pallas.tpu.profile.report import Report
from ejkernel_pallas.tpu.profile.text import print_report

FILE_PATH_TYPE = click.Path(dir_okay=False, path_type=Path)
FOLDER_PATH_TYPE = click.Path(file_okay=False, path_type=Path)


@click.command()
@add_call_options
@click.option(
    "--target", "targets", type=click.Choice(list(CHIPS)), multiple=True, default=("v5e",), show_default=True,
    help="TPU to compile for. Repeatable.",
)  # fmt: skip
@click.option("--gradient", is_flag=True, help="Also the kernels of the gradient.")
@click.option("--flops", type=click.FloatRange(min=0, min_open=True), help="Useful operations of the call, for MFU.")
@click.option("--plot", "plot_path", type=FILE_PATH_TYPE, help="Draw the use of slots into a PNG file.")
@click.option("--keep", "dump_folder", type=FOLDER_PATH_TYPE, help="Leave what libtpu writes in this directory.")
@click.pass_context
def profile(
    ctx: click.Context,
    spec: CallOptions,
    targets: tuple[str, ...],
    gradient: bool,
    flops: float | None,
    plot_path: Path | None,
    dump_folder: Path | None,
) -> None:
    """Predict how fast a call's TPU kernels are, without a TPU.

    Compiles the call for each target with libtpu, on any machine, and simulates the schedule: time, loops, slots in
    use, spills, VMEM, and the bytes that are copied. What XLA does around the kernels is left out. Exits with 1 if a
    target has no kernel for the call, or does not compile it.

    \b
    ejkernel profile flash_attention --shape 1,4096,8,128 --dtype bfloat16 -o causal=true --target v6e
    """
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'ejkernel-core[plot]'")
    call = spec.one()
    with one_line_errors():
        record = call.make_args(jax.random.key(0))
        case = make_profile_case(f"{call.op.name}: {call.label}", call.op.name, record, call.platform, gradient, flops)
    reports = [_profile_case(case, target, dump_folder) for target in targets]
    for report in reports:
        print_report(open_console(), report)
    drawn = [report for report in reports if report.kernels]
    if plot_path is not None and drawn:
        from ejkernel_pallas.tpu.profile.plot import draw_reports

        draw_reports(drawn, plot_path)
        click.echo(f"drawn in {plot_path}")
    if len(drawn) < len(reports):
        ctx.exit(1)


def _profile_case(case: Case, target: str, dump_folder: Path | None) -> Report:
    try:
        return profile_many([case], target=target, dump_folder=None if dump_folder is None else dump_folder / target)[0]
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
