"""What an eager call on small shapes costs over calling the already jitted function.

    python benchmarks/library/eager_overhead.py [--quick]

The calls take turns in blocks, and medians of the blocks are printed. The time of the calling thread leaves out what
other programs, and the device, do meanwhile. Goal: 60 µs.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ejkernel.modules import flash_attention

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

BLOCK = 200  # calls between two readings of the clock


def microseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Mean time of a call within one block: on the clock until its result is there, and of the calling thread."""
    clock, thread = time.perf_counter(), time.thread_time()
    for _ in range(BLOCK):
        result = call()
    thread = time.thread_time() - thread
    jax.block_until_ready(result)
    return 1e6 * (time.perf_counter() - clock) / BLOCK, 1e6 * thread / BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 40
    inputs = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    query, key, value = inputs
    ours = functools.partial(flash_attention, causal=True)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    calls = {
        "jitted flash_attention": functools.partial(jax.jit(ours), query, key, value),
        "eager flash_attention": functools.partial(ours, query, key, value),
        "eager jax.nn.dot_product_attention": functools.partial(theirs, query, key, value),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            taken = microseconds(call)
            if turn:  # the first turn compiles
                times[name].append(taken)
    medians = {name: [statistics.median(clock) for clock in zip(*taken, strict=True)] for name, taken in times.items()}
    base = medians["jitted flash_attention"]
    print(heading())
    rows = [
        (name, *(f"{us:.0f} µs, {us - own:+.0f} µs" for us, own in zip(clocks, base, strict=True)))
        for name, clocks in medians.items()
    ]
    print(markdown_table(("call", "median, over jitted", "of the calling thread, likewise"), rows))


if __name__ == "__main__":
    main()
