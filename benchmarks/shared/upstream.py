"""The library `ejkernel` 0.0.80.3 of the same name beside ours, in turns.

The two cannot share a process, so each interpreter runs the benchmark again with `--serve` and is asked in turns.
Only JAX and the standard library are imported here: the peer's interpreter may have nothing else.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

PASSES = ("forward", "forward + backward")
TABLE_COLUMNS = ("operation", "pass", "ejkernel ms", "0.0.80.3 ms", "speed-up", "its middle half", "sums apart by")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function of either library, its arrays, and which of them have a gradient."""

    call: Callable[..., Any]
    arrays: tuple[jax.Array, ...]
    argnums: tuple[int, ...]

    def compile_pass(self, pass_name: str) -> Callable[..., Any]:
        graded = jax.value_and_grad(lambda *a: jnp.sum(self.call(*a).astype(jnp.float32) ** 2), self.argnums)
        return jax.jit(self.call if pass_name == PASSES[0] else graded).lower(*self.arrays).compile()


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line of these benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--peer", help="python of an environment with ejkernel 0.0.80.3")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def serve(problems: dict[str, Problem], calls_per_sample: int) -> None:
    """Answers each line `[problem, pass]` with the seconds of a call among several, or with why there is none."""
    compiled: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        name, which = json.loads(line)
        problem, result = problems[name], None
        try:
            if (name, which) not in compiled:
                compiled[name, which] = problem.compile_pass(which)
            start = time.perf_counter()
            for _ in range(calls_per_sample):
                result = compiled[name, which](*problem.arrays)
            jax.block_until_ready(result)
            seconds = (time.perf_counter() - start) / calls_per_sample
            total = sum(jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in jax.tree.leaves(result))
            answer = {"seconds": seconds, "sum": float(total)}
        except Exception as error:  # noqa: BLE001  a peer that cannot run is a result
            answer = {"error": type(error).__name__}
        print("ANSWER " + json.dumps(answer), flush=True)


class ServingInterpreter:
    """One interpreter that serves the script that runs."""

    def __init__(self, python: str, problem_size: int, **environment: str) -> None:
        command = [python, sys.argv[0], "--serve", str(problem_size)]
        quiet = {**os.environ, "EJKERNEL_AUTOTUNE_POLICY": "heuristics", **environment}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
        )

    def measure(self, problem_name: str, pass_name: str) -> dict[str, Any]:
        """One sample."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("started without pipes")
        print(json.dumps([problem_name, pass_name]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"{self.process.args} ended before it answered")


def comparison_rows(
    peer_python: str, problem_names: Iterable[str], problem_size: int, repeats: int, **environment: str
) -> list[tuple[str, ...]]:
    """The rows of a table: both passes of the named problems, in this interpreter and in the peer's."""
    sides = (
        ServingInterpreter(sys.executable, problem_size, **environment),
        ServingInterpreter(peer_python, problem_size, **environment),
    )
    return [comparison_row(sides, name, which, repeats) for name in problem_names for which in PASSES]


def comparison_row(
    interpreters: tuple[ServingInterpreter, ServingInterpreter], problem_name: str, pass_name: str, repeats: int
) -> tuple[str, ...]:
    """A row of the table; the speed-up is the median of those of single turns, which share what else is running."""
    first = [side.measure(problem_name, pass_name) for side in interpreters]
    if "error" in first[0]:
        raise RuntimeError(f"{problem_name}, {pass_name}: {first[0]['error']}")
    times: list[list[float]] = [[], []]
    for turn in range(repeats):
        for n in (0, 1) if turn % 2 else (1, 0):  # neither always runs behind the other
            if "error" not in first[n]:
                times[n].append(interpreters[n].measure(problem_name, pass_name)["seconds"] * 1e3)
    ours = statistics.median(times[0])
    if "error" in first[1]:
        return problem_name, pass_name, f"{ours:.1f}", f"cannot run: {first[1]['error']}", "", "", ""
    theirs, apart = statistics.median(times[1]), abs(first[0]["sum"] / first[1]["sum"] - 1)
    ratios = sorted(other / own for own, other in zip(*times, strict=True))
    middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
    return (
        problem_name,
        pass_name,
        f"{ours:.1f}",
        f"{theirs:.1f}",
        f"{statistics.median(ratios):.2f}",
        middle,
        f"{apart:.0e}",
    )
