"""How long a call of each operation takes to trace, to lower and to compile, forward and with gradients.

    python benchmarks/library/compile_time.py [--only OP ...] [--repeats N] [--quick]

One realistic size an operation: its benchmark case, or its largest where it has none; and the delta rules and GLA with
a gate for every channel, which is more work. Shapes alone are given, so nothing runs. Each figure is the least of
several, as other work can only add to it, and imports are in none. Goal: 3 s for all three together.
"""

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.call import call
from ejkernel.ops.model import Op
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import array_fields

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

GOAL = 3.0
GATED = {"gated_delta_rule": "decay", "kernel_delta_attention": "decay", "gated_linear_attention": "g"}
"""Operation -> its argument of gates."""

QUICK = ("flash_attention", "gated_delta_rule")


def realistic(op: Op) -> tuple[str, Any]:
    """The call to compile, with its name: shapes for arrays."""
    made = {case: jax.eval_shape(case.make, jax.random.key(0)) for case in op.cases}
    cases = [case for case in made if "bench" in case.tags] or list(made)
    case = max(cases, key=lambda case: sum(math.prod(x.shape) for x in jax.tree.leaves(made[case])))
    return case.name, made[case]


def total(op: Op, args: Any) -> Any:
    """The sum of all floating outputs of a call."""
    leaves = jax.tree.leaves(call(op, args))
    return sum(jnp.sum(x.astype(jnp.float32)) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


def gradients(op: Op, args: Any) -> Callable[[Any], Any] | None:
    """The gradients of `total` for every floating array; None where the operation has none."""
    if not any(one.backward for one in registry().implementations[op.name]):
        return None
    floating = {
        name: value
        for name, value in array_fields(args).items()
        if all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(value))
    }

    def computed(args: Any) -> Any:
        values = {name: getattr(args, name) for name in floating}
        return jax.grad(lambda values: total(op, dataclasses.replace(args, **values)))(values)

    return computed


def by_channel(op: Op) -> Any:
    """A call of a recurrence with a gate for every channel of the keys and a state to begin with; None elsewhere."""
    if op.name not in GATED:
        return None
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens, state = array((1, 4096, 8, 128)), array((1, 8, 128, 128))
    given: dict[str, Any] = dict.fromkeys(("query", "key", "value", GATED[op.name]), tokens)
    beta = {"beta": array((1, 4096, 8))} if GATED[op.name] == "decay" else {}
    return op.arguments(**given, **beta, initial_state=state)


def seconds(function: Callable[[Any], Any], args: Any) -> tuple[float, float, float]:
    """What tracing, lowering and compiling take."""
    clock = [time.perf_counter()]
    traced = jax.jit(function).trace(args)
    clock.append(time.perf_counter())
    lowered = traced.lower()
    clock.append(time.perf_counter())
    lowered.compile()
    clock.append(time.perf_counter())
    return clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]


def rows(names: list[str], repeats: int) -> Iterator[tuple[str, ...]]:
    """A row for each pass of each operation."""
    for name in names:
        op = registry().op(name)
        calls = [realistic(op), ("gates of channels", by_channel(op))]
        for label, args in calls:
            if args is None:
                continue
            passes = {"forward": lambda args, op=op: call(op, args), "with gradients": gradients(op, args)}
            for direction, function in passes.items():
                if function is None:
                    continue
                try:
                    times = min((fresh(function, args) for _ in range(repeats)), key=sum)
                except NotImplementedError as error:  # some arguments have no gradient, and the call says which
                    yield name, label, direction, *("-" * 3), str(error)
                else:
                    marked = f"{sum(times):.2f}" if sum(times) <= GOAL else f"**{sum(times):.2f}**"
                    yield name, label, direction, *(f"{t:.2f}" for t in times), marked


def fresh(function: Callable[[Any], Any], args: Any) -> tuple[float, float, float]:
    """`seconds` of a function that JAX has not seen."""
    jax.clear_caches()
    return seconds(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few operations")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these operations")
    parser.add_argument("--repeats", type=int, default=3, help="times that everything is compiled")
    options = parser.parse_args()
    names = options.only or (QUICK if options.quick else sorted(registry().ops))
    print(heading())
    columns = ("operation", "case", "pass", "trace s", "lower s", "compile s", "together s")
    print(markdown_table(columns, []), flush=True)
    for row in rows(list(names), 1 if options.quick else options.repeats):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
