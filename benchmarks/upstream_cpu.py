"""Recurrences and grouped matmul on a CPU against the library `ejkernel` 0.0.80.3 of the same name, in turns.

python benchmarks/upstream_cpu.py --peer <python of an environment that has it> [--quick]

The two cannot share a process, so each interpreter runs this file with `--serve` and is asked in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def problems(tokens: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...], tuple[int, ...]]]:
    """Name -> (function, arrays, arguments with a gradient), of whichever library this interpreter has."""
    from ejkernel import modules  # both libraries answer to this name

    ops = {name: getattr(modules, name) for name in NAMES}
    query, key, value, noise = jax.random.normal(jax.random.key(0), (4, 1, tokens, 8, 64))
    key = key / 8
    gate = jax.nn.log_sigmoid(noise) / 16
    delta = (query, key, value, jax.nn.sigmoid(noise[..., 0]), gate[..., 1])
    step = jax.nn.softplus(noise[..., 0])
    space = (value, -jnp.arange(1.0, 9.0), key[:, :, :1], query[:, :, :1], jnp.ones(8), step)
    rows, matrices = (
        jax.random.normal(jax.random.key(1), (tokens, 512)),
        jax.random.normal(jax.random.key(2), (8, 512, 512)),
    )
    sizes = jnp.asarray([tokens // 4, 0, tokens // 8, 1, tokens // 4 - 1, tokens // 8, 0, tokens // 4], jnp.int32)

    def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return ops["grouped_matmul"](lhs, rhs, sizes)

    def state_space(*arrays: jax.Array) -> jax.Array:
        return ops["state_space_v2"](*arrays)[0]

    return {
        "GLA, a gate a channel": (ops["gla_attention"], (query, key, value, gate), (0, 1, 2, 3)),
        "gated delta rule": (ops["gated_delta_rule"], delta, (0, 1, 2, 3, 4)),
        "kernel delta attention": (ops["kernel_delta_attention"], delta, (0, 1, 2, 3, 4)),
        "state space v2": (state_space, space, tuple(range(6))),
        "state space v2, Mamba-2 130M": (state_space, mamba(tokens), tuple(range(6))),
        "grouped matmul": (matmul, (rows, matrices), (0, 1)),
    }


def mamba(tokens: int) -> tuple[jax.Array, ...]:
    """Arguments of `state_space_v2` in the sizes of that model's layers: 24 heads of 64 and states of 128."""
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (1, tokens, 24, 64))
    write, read = (jax.random.normal(k, (1, tokens, 1, 128)) / 128**0.5 for k in keys[1:3])
    step = jax.nn.softplus(jax.random.normal(keys[3], (1, tokens, 24)))
    return x, -jnp.linspace(1.0, 16.0, 24), write, read, jnp.ones(24), step


NAMES = ("gla_attention", "gated_delta_rule", "kernel_delta_attention", "state_space_v2", "grouped_matmul")
PASSES = ("forward", "forward + backward")


def serve(tokens: int) -> None:
    """Answers each line `[problem, pass]` with the seconds of one run and a checksum, or with why there is none."""
    compiled: dict[tuple[str, str], Any] = {}
    made = problems(tokens)
    for line in sys.stdin:
        name, which = json.loads(line)
        call, arrays, argnums = made[name]
        try:
            if (name, which) not in compiled:
                graded = jax.value_and_grad(lambda *a, call=call: jnp.sum(call(*a).astype(jnp.float32) ** 2), argnums)
                compiled[name, which] = jax.jit(call if which == PASSES[0] else graded).lower(*arrays).compile()
            start = time.perf_counter()
            result = jax.block_until_ready(compiled[name, which](*arrays))
            seconds = time.perf_counter() - start
            answer = {"seconds": seconds, "sum": float(sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(result)))}
        except Exception as error:  # noqa: BLE001  a peer that cannot run is a result
            answer = {"error": type(error).__name__}
        print("ANSWER " + json.dumps(answer), flush=True)


class Side:
    """One interpreter that serves."""

    def __init__(self, python: str, tokens: int) -> None:
        command = [python, __file__, "--serve", str(tokens)]
        quiet = {**os.environ, "JAX_PLATFORMS": "cpu", "EJKERNEL_AUTOTUNE_POLICY": "heuristics"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
        )

    def ask(self, name: str, which: str) -> dict[str, Any]:
        """One run."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("started without pipes")
        print(json.dumps([name, which]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"{self.process.args} ended before it answered")


def compare(sides: tuple[Side, Side], name: str, which: str, repeats: int) -> tuple[str, ...]:
    """A row of the table; the speed-up is the median of those of single turns, which share what else is running."""
    first = [side.ask(name, which) for side in sides]
    if "error" in first[0]:
        raise RuntimeError(f"{name}, {which}: {first[0]['error']}")
    times: list[list[float]] = [[], []]
    for turn in range(repeats):
        for n in (0, 1) if turn % 2 else (1, 0):  # neither always runs behind the other
            if "error" not in first[n]:
                times[n].append(sides[n].ask(name, which)["seconds"] * 1e3)
    ours = statistics.median(times[0])
    if "error" in first[1]:
        return name, which, f"{ours:.1f}", f"cannot run: {first[1]['error']}", "", "", ""
    theirs, apart = statistics.median(times[1]), abs(first[0]["sum"] / first[1]["sum"] - 1)
    ratios = sorted(other / own for own, other in zip(*times, strict=True))
    middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
    return name, which, f"{ours:.1f}", f"{theirs:.1f}", f"{statistics.median(ratios):.2f}", middle, f"{apart:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Recurrences and grouped matmul against another library")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--peer", help="python of an environment with ejkernel 0.0.80.3")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if not options.peer:
        return print("no --peer: nothing to compare with")
    import _report  # reads the metadata of distributions that the peer's interpreter lacks

    tokens, repeats = (512, 3) if options.quick else (2048, 15)
    sides = Side(sys.executable, tokens), Side(options.peer, tokens)
    rows = [compare(sides, name, which, repeats) for name in problems(tokens) for which in PASSES]
    print(_report.heading())
    print(f"{tokens} tokens, 8 heads of 64 where no model is named, float32; grouped matmul by [8, 512, 512];")
    print(f"medians of {repeats} turns\n")
    columns = ("operation", "pass", "ejkernel ms", "0.0.80.3 ms", "speed-up", "its middle half", "sums apart by")
    print(_report.markdown_table(columns, rows))
    return None


if __name__ == "__main__":
    main()
