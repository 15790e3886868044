"""Calls as data, noted so that they can be tuned later."""

from ejkernel.ops.call import default_chain, make_plan
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.execution.kernel import Invocation
from ejkernel.ops.plugins import registry
from ejkernel.ops.recording import RecordedCall, get_recorded, record_call, record_calls

__all__ = ["get_invocations", "record_invocation"]


def record_invocation(invocation: Invocation, chain: ConfigSelectorChain | None = None) -> None:
    """Notes a call for `autotune_recorded`, as `record_calls` does with those that are traced in its block.

    Args:
        invocation: The call; arrays or `jax.ShapeDtypeStruct`s.
        chain: Whose configurations are tuned; None for those of the public functions.
    """
    op = registry().op(invocation.op_id)
    op, record, options = op.routed_call(invocation.arguments(), invocation.options())
    plan = make_plan(op, record, options["platform"], options["cfg"], chain or default_chain())
    with record_calls():
        record_call(plan, record, options["mesh"], options["in_specs"])


def get_invocations() -> tuple[RecordedCall, ...]:
    """Returns the distinct calls noted so far: `get_recorded`."""
    return get_recorded()
