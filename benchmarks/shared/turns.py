"""Times of calls on a GPU, side by side: what the benchmarks of paged attention share."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import shared.report

SAMPLE_SECONDS = 0.025
"""Seconds that a sample takes, about: starting the first of its calls and waiting for the last one is then little."""
MAX_CALLS_PER_SAMPLE = 400

TimedCall = Callable[[], Any]


def wait_for_outputs(outputs: Any) -> None:
    """Returns when a side's work is done, be it JAX's or PyTorch's."""
    jax.block_until_ready(outputs)
    if any(hasattr(x, "is_cuda") for x in jax.tree.leaves(outputs)):
        import torch

        torch.cuda.synchronize()


def seconds_per_call(call: TimedCall, num_calls: int) -> float:
    """Seconds of a call, of several one after the other, so that starting them costs nothing.

    Only the last output is kept, so that a copy does not ask for new memory each time.
    """
    start, outputs = time.perf_counter(), None
    for _ in range(num_calls):
        outputs = call()
    wait_for_outputs(outputs)
    return (time.perf_counter() - start) / num_calls


def time_in_turns(contenders: dict[str, TimedCall], num_rounds: int) -> dict[str, float]:
    """Median seconds of a call of each side, in samples that take equally long."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    counts: dict[str, int] = {}
    for _ in shared.report.locked_rounds(num_rounds):
        for name, call in contenders.items():
            wait_for_outputs(call())
            if name not in counts:
                some = 10 if seconds_per_call(call, 1) < SAMPLE_SECONDS / 10 else 1
                counts[name] = max(1, min(MAX_CALLS_PER_SAMPLE, round(SAMPLE_SECONDS / seconds_per_call(call, some))))
            times[name].append(seconds_per_call(call, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}
