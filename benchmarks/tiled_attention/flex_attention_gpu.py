"""Attention with `score_mod` and `mask_mod` on a GPU: against equivalent arguments and torch's flex attention.

    python benchmarks/tiled_attention/flex_attention_gpu.py  # a table
    python benchmarks/tiled_attention/flex_attention_gpu.py --prepare  # compiles and checks, and measures nothing
    python benchmarks/tiled_attention/flex_attention_gpu.py --seconds 500  # begins no problem later; --skip goes on

Sizes and functions are those of PyTorch's own benchmark (`benchmarks/transformer/score_mod.py`: 16 heads, bfloat16,
uniform inputs). Times of flex attention leave out its block mask, which is computed once; ours find their blocks in
every pass. Every side must agree with the first one before it is timed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import shared.gpu_peers
import shared.report
import shared.turns

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

HEADS, WINDOW, DOCUMENTS, SOFT_CAP = 16, 256, 8, 20.0
COLUMNS = ("function", "B", "S", "D", "pass", "ours ms", "arguments ms", "ours / arguments", "flex ms", "flex / ours")
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One function at one size.

    Attributes:
        name: Its name.
        batch: Batch rows.
        length: Queries, and keys.
        head_dim: Head dimension.
    """

    name: str
    batch: int
    length: int
    head_dim: int

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the output's cotangent, uniform as in PyTorch's benchmark."""
        shape = (4, self.batch, self.length, HEADS, self.head_dim)
        return tuple(jax.random.uniform(jax.random.key(0), shape, jnp.bfloat16))

    def documents(self) -> np.ndarray:
        """Document of every token, int32 [S]."""
        starts = np.random.RandomState(0).randint(1, self.length, DOCUMENTS - 1)
        return np.searchsorted(np.sort(starts), np.arange(self.length), side="right").astype(np.int32)

    def prefixes(self) -> np.ndarray:
        """Length of every row's prefix, int32 [B]."""
        return (self.length // 8 + 40 * np.arange(self.batch)).astype(np.int32)


def functions_of(problem: Problem, xp: Any, ids: Any, prefixes: Any) -> dict[str, Any]:
    """The problem's `score_mod` and `mask_mod`, written with NumPy's names.

    Args:
        problem: The problem.
        xp: `jax.numpy`, or PyTorch.
        ids: Document of every token, an array of `xp`.
        prefixes: Length of every row's prefix, an array of `xp`.
    """
    masks: dict[str, Function] = {
        "causal": lambda b, h, q, k: q >= k,
        "sliding window": lambda b, h, q, k: (q >= k) & (q - k <= WINDOW),
        "document": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        "prefix": lambda b, h, q, k: (q >= k) | (k < prefixes[b]),
    }
    scores: dict[str, Function] = {
        "alibi": lambda score, b, h, q, k: score + (k - q) * xp.exp2(-((h + 1) * 8.0 / HEADS)),
        "soft cap": lambda score, b, h, q, k: SOFT_CAP * xp.tanh(score / SOFT_CAP),
        "relative": lambda score, b, h, q, k: score + (q - k),
    }
    return {"score_mod": scores.get(problem.name), "mask_mod": masks.get(problem.name)}


def with_functions(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Attention with the problem's functions."""
    return flash_attention(q, k, v, **functions_of(problem, jnp, *arrays))


def with_arguments(
    problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, prefixes: jax.Array
) -> jax.Array:
    """The same by arguments."""
    batch_ids = jnp.broadcast_to(ids, (problem.batch, problem.length))
    options: dict[str, dict[str, Any]] = {
        "noop": {},
        "causal": {"causal": True},
        "sliding window": {"causal": True, "sliding_window": (WINDOW, 0)},
        "document": {"causal": True, "mask_info": MaskInfo.from_segments(batch_ids)},
        "soft cap": {"logits_soft_cap": SOFT_CAP},
    }
    return flash_attention(q, k, v, **options[problem.name])


def jax_passes(side: Function, problem: Problem) -> tuple[Callable[[], Any], ...]:
    """Both passes of a side, compiled."""
    query, key, value, cotangent = problem.inputs()
    captured = jnp.asarray(problem.documents()), jnp.asarray(problem.prefixes())

    def gradients(*arrays: jax.Array) -> Any:
        output, pull = jax.vjp(lambda *x: side(problem, *x, *arrays[4:]), *arrays[:3])
        return output, *pull(arrays[3])

    forward = jax.jit(functools.partial(side, problem)).lower(query, key, value, *captured).compile()
    both = jax.jit(gradients).lower(query, key, value, cotangent, *captured).compile()
    return (
        functools.partial(forward, query, key, value, *captured),
        functools.partial(both, query, key, value, cotangent, *captured),
    )


def flex_passes(problem: Problem) -> tuple[Callable[[], Any], ...]:
    """Both passes of torch's flex attention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shared.gpu_peers.keep_triton_cache()
    torch._dynamo.reset()
    captured = (torch.from_numpy(x).cuda() for x in (problem.documents(), problem.prefixes()))
    functions = functions_of(problem, torch, *captured)
    mask = None
    if functions["mask_mod"] is not None:
        batch = problem.batch if problem.name == "prefix" else None
        mask = create_block_mask(functions["mask_mod"], batch, None, problem.length, problem.length, device="cuda")
    call = functools.partial(torch.compile(flex_attention), score_mod=functions["score_mod"], block_mask=mask)
    forward, both = shared.gpu_peers.torch_passes(call, problem.inputs())
    return lambda: forward().transpose(1, 2), both


def check(ours: Any, theirs: Any) -> None:
    """Raises an error where a side's outputs differ from ours."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = (
            array if isinstance(array, jax.Array) else jnp.from_dlpack(array.detach().contiguous())
            for array in (one, other)
        )
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        np.testing.assert_allclose(jnp.max(jnp.abs(x - y)), 0, atol=2e-2 * max(1.0, float(jnp.abs(y).max())))


def rows(problem: Problem, num_rounds: int, has_flex: bool) -> Iterator[list[str]]:
    """The lines of the table of a problem, one per pass; no round compiles and checks alone."""
    sides = {"ours": jax_passes(with_functions, problem)}
    if problem.name not in ("alibi", "relative", "prefix"):
        sides["arguments"] = jax_passes(with_arguments, problem)
    if has_flex:
        sides["flex"] = flex_passes(problem)
    for n, name in enumerate(("forward", "forward + backward")):
        calls = {side: passes[n] for side, passes in sides.items()}
        if not num_rounds:
            outputs = {side: call() for side, call in calls.items()}
            for side in outputs:
                check(outputs["ours"], outputs[side])
            continue
        times = {side: 1e3 * seconds for side, seconds in shared.turns.time_in_turns(calls, num_rounds).items()}
        ours, found = times["ours"], [""] * 4
        if "arguments" in times:
            found[:2] = f"{times['arguments']:.3f}", f"{ours / times['arguments']:.2f}"
        if "flex" in times:
            found[2:] = f"{times['flex']:.3f}", f"{times['flex'] / ours:.2f}"
        sizes = map(str, (problem.batch, problem.length, problem.head_dim))
        yield [problem.name, *sizes, name, f"{ours:.3f}", *found]


def rows_in_time(problems: list[Problem], seconds: float, num_rounds: int, has_flex: bool) -> Iterator[list[str]]:
    """The lines of all problems; it begins none after the time is over, and says how many it had finished."""
    deadline = time.monotonic() + seconds
    for number, problem in enumerate(problems):
        if time.monotonic() > deadline:
            print(
                f"{number} of {len(problems)} problems in {seconds:.0f} s: add {number} to --skip to go on",
                file=sys.stderr,
            )
            return
        yield from rows(problem, num_rounds, has_flex)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ("noop", "causal", "sliding window", "document", "alibi", "soft cap", "relative", "prefix")
    parser.add_argument("--functions", default=",".join(names), help="names of functions, with commas between them")
    parser.add_argument("--sizes", default="8x4096x64,8x4096x128,16x1024x64", help="batch x length x head dimension")
    parser.add_argument("--prepare", action="store_true", help="compile and check alone")
    parser.add_argument("--without-flex", action="store_true", help="leave flex attention out, which compiles slowly")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem after this time")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many of the first problems")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    has_flex = importlib.util.find_spec("torch") is not None and not options.without_flex
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",")]
    problems = [Problem(name, *size) for size in sizes for name in options.functions.split(",")]
    num_rounds = 0 if options.prepare else options.rounds
    found = rows_in_time(problems[options.skip :], options.seconds, num_rounds, has_flex)
    shared.report.print_rows_as_measured(COLUMNS, found)


if __name__ == "__main__":
    main()
