"""Times of calls on a GPU, side by side: what the benchmarks of paged attention share."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import shared.report

SAMPLE = 0.025
"""Seconds that a sample takes, about: starting the first of its calls and waiting for the last one is then little."""
MOST_CALLS = 400

Side = Callable[[], Any]


def wait(made: Any) -> None:
    """Returns when a side's work is done, be it JAX's or PyTorch's."""
    jax.block_until_ready(made)
    if any(hasattr(x, "is_cuda") for x in jax.tree.leaves(made)):
        import torch

        torch.cuda.synchronize()


def seconds(side: Side, calls: int) -> float:
    """Seconds of a call, of several one after the other, so that starting them costs nothing.

    Only the last output is kept, so that a copy does not ask for new memory each time.
    """
    start, made = time.perf_counter(), None
    for _ in range(calls):
        made = side()
    wait(made)
    return (time.perf_counter() - start) / calls


def timed_in_turns(contenders: dict[str, Side], rounds: int) -> dict[str, float]:
    """Median seconds of a call of each side, in samples that take equally long."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    counts: dict[str, int] = {}
    for _ in shared.report.turns(rounds):
        for name, side in contenders.items():
            wait(side())
            if name not in counts:
                some = 10 if seconds(side, 1) < SAMPLE / 10 else 1
                counts[name] = max(1, min(MOST_CALLS, round(SAMPLE / seconds(side, some))))
            times[name].append(seconds(side, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}
