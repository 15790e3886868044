"""The expert layer of `examples/moe.py` on GPUs: what routing, sorting and un-sorting add to its grouped products.

    python benchmarks/grouped_matmul/moe_gpu.py  # one device, and all of them where there are several
    python benchmarks/grouped_matmul/moe_gpu.py --quick  # the first layer, without its parts
    # copies between devices without kernels: an option of the XLA of JAX 0.11
    python benchmarks/grouped_matmul/moe_gpu.py --peer

bfloat16, tokens and weights normal. `products` are the grouped products of the same groups alone, `mlp` has the
activation between them too, as a call of its own, where the layer gathers and gates in its first product, forward. The
rate counts the three products of M rows, three times with gradients; `share` is the products' time, as often as a side
has their tokens, in that of the side. Parts of the layer are timed alone, forward; dispatch and activation are parts of
it with gradients alone. Sides are interleaved, calls of 25 ms a sample.
"""

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import moe

from ejkernel.modules import grouped_matmul

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

COLUMNS = ("layer", "pass", "side", "ms", "rate", "share")
LAYERS = ((8192, 128, 2048, 768, 8), (16384, 8, 4096, 14336, 2))
"""Tokens, experts, size, inner size and experts a token: of Qwen3-30B-A3B and of Mixtral."""
MORE = "all devices, as many tokens each"
"""The side in which every device has as many tokens as one device has in the others."""
PEER = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
ROUNDS = 7


def graded(call: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A call and its gradients."""

    def run(*arrays: Any) -> Any:
        output, pullback = jax.vjp(call, *arrays)
        return output, pullback(output)

    return run


def parts_of(layer: Any, x: jax.Array, rows: jax.Array) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What is not a grouped product alone, by name: calls and their arguments."""
    to = moe.route(layer, x)
    places = (to.order, to.places)
    inner = jax.random.normal(jax.random.key(4), (rows.shape[0], layer.gate_up.shape[2]), x.dtype)
    return {
        "routing": (moe.route, (layer, x)),
        "first product, gathered and gated": (moe.hidden, (layer, x, *places, to.sizes)),
        "dispatch": (moe.dispatch, (x, *places)),
        "activation": (moe.gated, (inner,)),
        "combine": (moe.combine, (rows, to.weights, *places)),
    }


def spread(layer: Any, x: jax.Array) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The layer over all devices, and its arguments, which lie where they are needed."""
    mesh = jax.make_mesh((jax.device_count(),), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, parts = (jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("experts",)))
    shardings = dataclasses.replace(layer, router=whole, gate_up=parts, down=parts)
    return functools.partial(moe.sharded, mesh, "experts"), jax.device_put((layer, x), (shardings, parts))


def sides_of(layer: Any, x: jax.Array) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Calls and their arguments, by name."""
    sizes, rows = moe.route(layer, x).sizes, x.shape[0] * layer.top_k
    rows, inner = (
        jax.random.normal(jax.random.key(n), (rows, width), jnp.bfloat16)
        for n, width in ((2, layer.gate_up.shape[1]), (3, layer.down.shape[1]))
    )
    product = functools.partial(grouped_matmul, preferred_element_type=jnp.bfloat16)
    sides: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "products": (
            lambda layer, rows, inner: (product(rows, layer.gate_up, sizes), product(inner, layer.down, sizes)),
            (layer, rows, inner),
        ),
        "mlp": (lambda layer, rows: moe.mlp(layer, rows, sizes), (layer, rows)),
        "one device": (moe.moe, (layer, x)),
    }
    if jax.device_count() > 1:
        sides["all devices"] = spread(layer, x)
        sides[MORE] = spread(layer, jnp.tile(x, (jax.device_count(), 1)))
    return sides


def measure(tokens: int, experts: int, size: int, inner: int, top_k: int, *, whole: bool, options: Any) -> None:
    """Prints the lines of one layer, and of its parts where `whole`."""
    layer = moe.init(jax.random.key(0), experts, size, inner, top_k, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (tokens, size), jnp.bfloat16)
    sides = sides_of(layer, x)
    label = f"T{tokens} E{experts} D{size} F{inner} k{top_k}"
    operations = 6.0 * tokens * top_k * size * inner
    parts = parts_of(layer, x, sides["products"][1][1]) if whole else {}
    graded_sides = {name: (graded(call), arrays) for name, (call, arrays) in sides.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as compilers:
        forward, gradients, alone = (
            {name: compilers.submit(compiled, *side, options) for name, side in some.items()}
            for some in (sides, graded_sides, parts)
        )
    for name, calls, factor in (("forward", forward, 1), ("with gradients", gradients, 3)):
        times = shared.turns.time_in_turns({side: call.result() for side, call in calls.items()}, ROUNDS)
        for side, seconds in times.items():
            work = jax.device_count() if side == MORE else 1
            rate, share = work * factor * operations / seconds / 1e12, work * times["products"] / seconds
            print(f"| {label} | {name} | {side} | {seconds * 1e3:.3f} | {rate:.0f} TFLOP/s | {share:.2f} |", flush=True)
    for name, seconds in shared.turns.time_in_turns({n: call.result() for n, call in alone.items()}, ROUNDS).items():
        print(f"| {label} | forward | {name} | {seconds * 1e3:.3f} | | |", flush=True)


def compiled(call: Callable[..., Any], arrays: tuple[Any, ...], options: Any) -> Callable[[], Any]:
    """A call of these arrays, compiled."""
    return functools.partial(jax.jit(call).lower(*arrays).compile(options), *arrays)


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__, {"--quick": "the first layer, without its parts", "--peer": "copy between devices without kernels"}
    )
    print(shared.report.heading())
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    for layer in LAYERS[:1] if options.quick else LAYERS:
        measure(*layer, whole=not options.quick, options=PEER if options.peer else None)


if __name__ == "__main__":
    main()
