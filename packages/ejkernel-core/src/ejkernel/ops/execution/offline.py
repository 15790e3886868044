"""Tuning calls that were recorded earlier, or that are known only by their shapes."""

from collections.abc import Iterable
from typing import Any

import jax

from ejkernel.errors import TunerError
from ejkernel.ops.config.measurement import TuningResult
from ejkernel.ops.config.tuner import is_under_trace
from ejkernel.ops.grad import CallPlan
from ejkernel.ops.params import Direction
from ejkernel.ops.recording import RecordedCall, forget_call, get_recorded
from ejkernel.ops.tuning import BOTH_DIRECTIONS, tune_call


def autotune_recorded(
    calls: Iterable[RecordedCall] | None = None,
    *,
    show_progress: bool = False,
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS,
) -> list[TuningResult]:
    """Measures recorded calls and stores the winners in the chains that the calls were made through.

    Eager calls use the winners from then on; a function that the caller jitted keeps what it was compiled with. Calls
    that were tuned are no longer recorded. The processes of a job call this together.

    Args:
        calls: Which; None for all that were recorded.
        show_progress: Whether to show a progress bar over the calls.
        directions: Which passes to measure.

    Raises:
        TunerError: Under a trace; or after all calls, when some could not be measured.
    """
    if is_under_trace(()):
        raise TunerError("recorded calls cannot be measured under a trace")
    pending_calls = list(get_recorded() if calls is None else calls)
    results: list[TuningResult] = []
    problems: list[str] = []
    for call in _with_progress_bar(pending_calls, show_progress):
        try:
            results += tune_abstract(call.plan, call.args, directions, mesh=call.mesh, in_specs=call.in_specs)
            forget_call(call)
        except TunerError as error:
            problems.append(str(error))
    if problems:
        headline = f"{len(problems)} of {len(pending_calls)} recorded calls could not be tuned:"
        raise TunerError("\n".join([headline, *problems]))
    return results


def tune_abstract(
    plan: CallPlan,
    args: Any,
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS,
    *,
    mesh: Any = None,
    in_specs: Any = None,
) -> list[TuningResult]:
    """Measures a call known by its shapes, on inputs that the operation itself makes.

    Args:
        plan: How the call is carried out.
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        directions: Which passes.
        mesh: With in_specs: what is tuned is one shard of the call.
        in_specs: Partition specs of the first arguments, in public order.

    Raises:
        TunerError: In the same cases as in `tune_call`.
    """
    if is_under_trace(()):
        raise TunerError("the tuner was asked to measure under a trace; tune outside of jit")
    inputs = plan.op.make_inputs(args, jax.random.key(0))
    return tune_call(plan, inputs, directions, mesh=mesh, in_specs=in_specs)


def _with_progress_bar(calls: list[RecordedCall], show_progress: bool) -> Iterable[RecordedCall]:
    if not show_progress:
        return calls
    import tqdm

    return tqdm.tqdm(calls, desc="recorded calls", unit="call")


__all__ = ["autotune_recorded", "tune_abstract"]
