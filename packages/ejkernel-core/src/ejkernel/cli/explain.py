"""Implements `ejkernel explain`."""

import contextlib

import click

from ejkernel.cli.as_json import JSON_OPTION, decision_to_dict, print_json
from ejkernel.cli.calls import CallOptions, add_call_options, one_line_errors
from ejkernel.cli.tables import open_console, print_decision
from ejkernel.cli.targets import find_device_to_explain
from ejkernel.ops.call import decide
from ejkernel.ops.device import target_device

TARGET_HELP = (
    "Explain the call for a device that need not be in this machine: h200, mi300x, v6e, or a device kind such as "
    "'NVIDIA H200'. An unknown name lists the known ones."
)


@click.command()
@add_call_options
@click.option("--target", metavar="NAME", help=TARGET_HELP)
@JSON_OPTION
@click.pass_context
def explain(ctx: click.Context, call_options: CallOptions, target: str | None, as_json: bool) -> None:
    """Show which implementation a call would run, and why.

    Prints whether each implementation supports the call, with the reasons if it does not, and where the configuration
    comes from. Runs and measures nothing. The exit status is 1 if no implementation supports the call.

    \b
    ejkernel explain flash_attention --shape 1,128,8,64 -o causal=true
    ejkernel explain flash_attention --shape 1,128,8,64 --kv-shape 1,256,2,64 --dtype bfloat16 --target h200
    """
    call = call_options.one()
    device = contextlib.nullcontext() if target is None else target_device(find_device_to_explain(target))
    with one_line_errors(), device:
        decision = decide(call.op, call.abstract_args, platform=call.platform)
    if as_json:
        print_json(decision_to_dict(decision))
    else:
        print_decision(open_console(), decision)
    if decision.forward.implementation is None:
        ctx.exit(1)
