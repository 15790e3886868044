"""Ring attention over the GPUs of one host against flash attention with its heads split over them.

    python benchmarks/ring_attention/ring_attention_gpu.py                    # sequences of 65536 and 131072
    python benchmarks/ring_attention/ring_attention_gpu.py --quick            # 16384
    python benchmarks/ring_attention/ring_attention_gpu.py --unchecked        # without the comparison with float32
    python benchmarks/ring_attention/ring_attention_gpu.py --output results   # also results/ring_attention_gpu.md

Both sides get the same normal bfloat16 numbers, 32 query heads and 8 KV heads of 128, causal, each placed as it wants
them: the ring has the sequence spread over the devices, the other side the heads, which needs no transfers and stops at
as many devices as there are KV heads. Before anything is timed, rings of several kinds have to agree with float32 at
4096 tokens, outputs and gradients. Sides are interleaved; medians and interquartile ranges are of rounds. Of the causal
mask's pairs, four operations count for each of a head's numbers, and 2.5 times as many for the gradients. Memory is
what XLA plans for one device, arguments and results included, without the kernels of NCCL.
"""

import argparse
import dataclasses
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types import MaskInfo

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

HEADS, KV_HEADS, SIZE = 32, 8, 128
ROUNDS = 7
SAMPLE = 0.3
"""Seconds of calls a round."""
SEQUENCE, BY_HEAD = P(None, "gpus"), P(None, None, "gpus")
TOLERANCE = 1e-2
"""Of the relative error of bfloat16 results, in the Frobenius norm."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A way to compute a call: both passes compiled, and their memory in bytes.

    Attributes:
        forward: Query, key, value -> output.
        graded: Query, key, value, cotangent -> output and gradients.
        spec: How its arrays are placed.
    """

    forward: Any
    graded: Any
    spec: P

    def arrays(self, mesh: Mesh, length: int) -> list[jax.Array]:
        """Query, key, value and cotangent, the same numbers for all sides, placed for this one."""
        sizes = [x.shape for x in shapes(length, HEADS, KV_HEADS, None, P())]

        def make() -> list[jax.Array]:
            keys = jax.random.split(jax.random.key(0), len(sizes))
            return [jax.random.normal(k, size, jnp.bfloat16) for k, size in zip(keys, sizes, strict=True)]

        return jax.jit(make, out_shardings=NamedSharding(mesh, self.spec))()


def memory(compiled: Any) -> float:
    """Megabytes of one device."""
    found = compiled.memory_analysis()
    sizes = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
    return sum(sizes) / 1e6


def ring(mesh: Mesh, query: Any, key: Any, value: Any, *sinks: Any, **mask: Any) -> jax.Array:
    placed = {"mesh": mesh, "in_specs": (SEQUENCE,) * 3, "out_specs": SEQUENCE, "axis_name": "gpus"}
    return ring_attention(query, key, value, *sinks, **placed, **mask)


def by_head(mesh: Mesh, query: Any, key: Any, value: Any, **mask: Any) -> jax.Array:
    return flash_attention(query, key, value, mesh=mesh, in_specs=(BY_HEAD,) * 3, out_specs=BY_HEAD, **mask)


def gradients(call: Callable[..., Any], query: Any, key: Any, value: Any, cotangent: Any) -> tuple[Any, ...]:
    output, pull = jax.vjp(call, query, key, value)
    return output, *pull(cotangent)


def shapes(length: int, heads: int, kv_heads: int, mesh: Mesh | None, spec: P) -> list[Any]:
    """Of query, key, value and cotangent."""
    placed = None if mesh is None else NamedSharding(mesh, spec)
    return [
        jax.ShapeDtypeStruct((1, length, h, SIZE), jnp.bfloat16, sharding=placed)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def lowered(call: Callable[..., Any], mesh: Mesh | None, spec: P, length: int) -> tuple[Any, Any]:
    """Both passes of a call."""
    q, k, v, cotangent = shapes(length, HEADS, KV_HEADS, mesh, spec)
    return jax.jit(call).lower(q, k, v), jax.jit(functools.partial(gradients, call)).lower(q, k, v, cotangent)


def numbers(length: int, heads: int, kv_heads: int) -> list[Any]:
    """Query, key, value and cotangent on the host."""
    made = shapes(length, heads, kv_heads, None, P())
    rng = np.random.default_rng(0)
    return [rng.standard_normal(x.shape, np.float32).astype(jnp.bfloat16) for x in made]


SEGMENTS = MaskInfo.from_segments(jnp.asarray([[0] * 1500 + [1] * 2500 + [-1] * 96], jnp.int32))
SINKS = jnp.linspace(-1.0, 2.0, 8)[:, None]
CHECKS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "causal": ((), {"causal": True}),
    "full": ((), {}),
    "causal, segments, sinks, cap 30": ((SINKS,), {"causal": True, "mask_info": SEGMENTS, "logits_soft_cap": 30.0}),
    "causal, window 700": ((), {"causal": True, "sliding_window": (700, 0)}),
}


def check(mesh: Mesh) -> list[str]:
    """Largest relative errors of small rings, and of flash attention on one device, against float32.

    Raises:
        AssertionError: A ring is wrong.
    """
    values, lines = numbers(4096, 8, 2), []
    placed = [jax.device_put(x, NamedSharding(mesh, SEQUENCE)) for x in values]
    alone = [jnp.asarray(x) for x in values]
    for name, (sinks, mask) in CHECKS.items():

        def flash(q: Any, k: Any, v: Any, *, platform: str = "auto", sinks: Any = sinks, mask: Any = mask) -> Any:
            return flash_attention(q, k, v, None, None, None, *sinks, platform=platform, **mask)

        def around(q: Any, k: Any, v: Any, *, sinks: Any = sinks, mask: Any = mask) -> Any:
            return ring(mesh, q, k, v, *sinks, **mask)

        wide = [x.astype(jnp.float32) for x in alone]
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(gradients, functools.partial(flash, platform="xla")))
            made = exact.lower(*wide).compile(compiler_options={"xla_gpu_autotune_level": "0"})(*wide)
        want = [np.asarray(x) for x in made]
        errors = []
        for call, given in ((around, placed), (flash, alone)):
            made = jax.jit(functools.partial(gradients, call))(*given)
            pairs = zip(made, want, strict=True)
            errors.append(max(np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y) for x, y in pairs))
        lines.append(f"{name}: ring {errors[0]:.1e}, flash attention on one device {errors[1]:.1e}")
        print(f"<!-- {lines[-1]} -->", flush=True)
        assert errors[0] < TOLERANCE, lines[-1]
    return lines


def seconds(run: Callable[[], Any], calls: int) -> float:
    """Of one call among several, one after the other."""
    start = time.perf_counter()
    made = [run() for _ in range(calls)][-1]
    jax.block_until_ready(made)
    return (time.perf_counter() - start) / calls


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of every round of every side."""
    for run in runs.values():
        seconds(run, 1)
    calls = {name: max(1, round(SAMPLE / seconds(run, 1))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            times[name].append(seconds(runs[name], calls[name]))
    return times


def transfers(compiled: Any) -> list[str]:
    """The schedule of a compiled call, as far as transfers and kernels go."""
    words = r"(collective-permute-start|collective-permute-done|collective-permute|custom-call|while)\("
    lines = (re.search(r"%?([\w.-]+) = .*? " + words, line) for line in compiled.as_text().splitlines())
    return [f"{found[2]} {found[1]}" for found in lines if found]


def rows(mesh: Mesh, length: int, compiled: dict[str, Side], one: tuple[Any, Any]) -> list[list[str]]:
    """Lines of the table for a length."""
    arrays = {name: side.arrays(mesh, length) for name, side in compiled.items()}
    lines: list[list[str]] = []
    for which, factor in (("forward", 1.0), ("graded", 3.5)):
        runs = {
            name: functools.partial(getattr(side, which), *arrays[name][: 3 if which == "forward" else 4])
            for name, side in compiled.items()
        }
        found = timed(runs)
        medians = {name: statistics.median(times) for name, times in found.items()}
        for name, times in found.items():
            low, _, high = statistics.quantiles(times, n=4)
            operations = factor * 2 * length * length * HEADS * SIZE / mesh.size
            lines.append(
                [
                    f"{length}",
                    "forward" if which == "forward" else "forward + backward",
                    name,
                    f"{medians[name] * 1e3:.2f}",
                    f"{(high - low) * 1e3:.2f}",
                    f"{operations / medians[name] / 1e12:.0f}",
                    f"{medians['heads split'] / medians[name]:.3f}",
                    f"{memory(getattr(compiled[name], which)):.0f}",
                    f"{memory(one[which != 'forward']):.0f}",
                ]
            )
            print("|", " | ".join(lines[-1]), "|", flush=True)
    return lines


COLUMNS = ("tokens", "pass", "side", "median ms", "IQR ms", "TFLOP/s a GPU", "of heads split", "MB a GPU", "MB on one")


def compiled_sides(mesh: Mesh, lengths: Sequence[int]) -> dict[int, tuple[dict[str, Side], tuple[Any, Any]]]:
    """Everything that is timed, compiled, and flash attention on one device, for its memory alone."""
    calls: dict[str, tuple[Callable[..., Any], Mesh | None, P]] = {
        "ring": (functools.partial(ring, mesh, causal=True), mesh, SEQUENCE),
        "heads split": (functools.partial(by_head, mesh, causal=True), mesh, BY_HEAD),
        "one device": (functools.partial(flash_attention, causal=True), None, P()),
    }
    work = {(n, name): lowered(*call, n) for n in lengths for name, call in calls.items()}
    with ThreadPoolExecutor(8) as pool:
        jobs = {key: [pool.submit(x.compile) for x in pair] for key, pair in work.items()}
    done = {key: (forward.result(), graded.result()) for key, (forward, graded) in jobs.items()}
    specs = {"ring": SEQUENCE, "heads split": BY_HEAD}
    sides = {n: {name: Side(*done[n, name], spec) for name, spec in specs.items()} for n in lengths}
    return {n: (sides[n], done[n, "one device"]) for n in lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ring attention against flash attention with heads split, on GPUs.")
    parser.add_argument("--quick", action="store_true", help="one short sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072], help="lengths of the sequence")
    parser.add_argument("--unchecked", action="store_true", help="leave out the comparison with float32")
    parser.add_argument("--output", type=Path, help="folder to write the table to")
    options = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("gpus",), (AxisType.Auto,))
    begin = time.perf_counter()
    lengths = [16384] if options.quick else options.tokens
    made = compiled_sides(mesh, lengths)
    print(f"<!-- compiled after {time.perf_counter() - begin:.0f} s -->", flush=True)
    checks = [] if options.unchecked else check(mesh)
    print(f"<!-- checked after {time.perf_counter() - begin:.0f} s -->", flush=True)
    found = [line for n in lengths for line in rows(mesh, n, *made[n])]
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax-cuda13-plugin", "nvidia-nccl-cu13"))
    text = [
        shared.report.heading(),
        f"{mesh.size} GPUs of one host; {packages}; causal, bfloat16, {HEADS}/{KV_HEADS} heads of {SIZE}\n",
        shared.report.markdown_table(COLUMNS, found),
        *(
            ["\nRelative errors against float32 at 4096 tokens, outputs and gradients, the largest:\n"]
            if checks
            else []
        ),
        *(f"- {line}" for line in checks),
    ]
    print("\n".join(text), flush=True)
    if options.output:
        (options.output / "ring_attention_gpu.md").write_text("\n".join(text) + "\n")
        side = made[lengths[0]][0]["ring"]
        schedule = ["forward", *transfers(side.forward), "", "forward + backward", *transfers(side.graded)]
        (options.output / "ring_attention_gpu_schedule.txt").write_text("\n".join(schedule) + "\n")


if __name__ == "__main__":
    main()
