"""`ejkernel explain`."""

import click

from ejkernel.cli.as_json import AS_JSON, plain_decision, print_json
from ejkernel.cli.calls import CallSpec, one_line_errors, takes_call
from ejkernel.cli.tables import console, print_decision
from ejkernel.ops.call import decide


@click.command()
@takes_call
@AS_JSON
@click.pass_context
def explain(ctx: click.Context, spec: CallSpec, as_json: bool) -> None:
    """Show what a call would run, and why.

    The verdict on every implementation, and where the configuration comes from. Runs and measures nothing. Exits with
    1 if no implementation serves the call.

    \b
    ejkernel explain flash_attention --shape 1,128,8,64 -o causal=true
    ejkernel explain flash_attention --shape 1,128,8,64 --kv-shape 1,256,2,64 --dtype bfloat16
    """
    call = spec.one()
    with one_line_errors():
        decision = decide(call.op, call.abstract, platform=call.platform)
    if as_json:
        print_json(plain_decision(decision))
    else:
        print_decision(console(), decision)
    if decision.forward.implementation is None:
        ctx.exit(1)
