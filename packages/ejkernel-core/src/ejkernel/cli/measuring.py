"""Times functions so that other load disturbs all of them alike, and reads their memory use."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def interleaved_medians(
    calls: Sequence[Callable[[], Any]], repeats: int, *, is_already_warm: bool = False
) -> list[float]:
    """Returns the median seconds of each call; the calls are timed interleaved.

    Args:
        calls: What to time; each returns its arrays.
        repeats: Timed runs of each.
        is_already_warm: Whether they have run before; otherwise they do once, untimed.
    """
    return [statistics.median(times) for times in interleaved_samples(calls, repeats, is_already_warm=is_already_warm)]


def interleaved_samples(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    *,
    is_already_warm: bool = False,
    after_round: Callable[[], None] | None = None,
) -> list[list[float]]:
    """Returns the seconds of every run of each call.

    Arguments are as in `interleaved_medians`, and what to call after each round.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in () if is_already_warm else calls:
        jax.block_until_ready(call())
    for _ in range(repeats):
        for call, record in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            record.append(time.perf_counter() - start)
        if after_round is not None:
            after_round()
    return times


def temporary_bytes(compiled: Any) -> int | None:
    """Returns the memory that a compiled function needs in addition to inputs and outputs; None if unknown."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
