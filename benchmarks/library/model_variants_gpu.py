"""What models add to an operation, on a GPU, against the plain call of the same sizes, with gradients too.

    python benchmarks/library/model_variants_gpu.py
    python benchmarks/library/model_variants_gpu.py --check    # no times: small calls on any device

| pair | the variant | the plain call |
|---|---|---|
| delta rule | Qwen3-Next: 16 heads of queries and keys, 32 of values | 32 heads of all three |
| experts | GPT-OSS: biases, a SwiGLU with a limit, interleaved columns | SwiGLU alone |
| loss | `fused_cross_entropy` of hidden states | the three products of logits and both gradients, by chunks |

A pair is timed in turns, on random bfloat16 arrays, after the variant agreed with XLA in float32 at small sizes. The
last column is the variant's time in parts of the plain call's.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import fused_cross_entropy, gated_delta_rule, gated_grouped_matmul

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

COLUMNS = ("pair", "sizes", "pass", "variant ms", "plain ms", "variant / plain")
Call = Callable[..., Any]


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random numbers."""
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def delta_rule(small: bool) -> tuple[str, Call, tuple[Any, ...], Call, tuple[Any, ...]]:
    """Qwen3-Next's value heads against as many heads of queries and keys."""
    batch, tokens, few, many, size = (1, 70, 2, 4, 16) if small else (4, 8192, 16, 32, 128)
    beta = jax.nn.sigmoid(normal(3, batch, tokens, many, dtype=jnp.float32))
    # The layer's own gates at the start: A uniform in 1 to 16, dt log-uniform in 0.001 to 0.1.
    rate = jax.random.uniform(jax.random.key(5), (many,), minval=1.0, maxval=16.0)
    step = jnp.exp(jax.random.uniform(jax.random.key(4), beta.shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)))

    def arrays(heads: int) -> tuple[Any, ...]:
        query, key = normal(0, batch, tokens, heads, size), normal(1, batch, tokens, heads, size)
        return query, key, normal(2, batch, tokens, many, size), beta, -rate * step

    return (
        f"B{batch} T{tokens} {few}/{many} heads K{size}",
        gated_delta_rule,
        arrays(few),
        gated_delta_rule,
        arrays(many),
    )


def experts(small: bool) -> tuple[str, Call, tuple[Any, ...], Call, tuple[Any, ...]]:
    """GPT-OSS's first product against a plain gated one."""
    tokens, count, width, inner = (60, 4, 32, 24) if small else (16384, 32, 2880, 2880)
    share = jax.random.dirichlet(jax.random.key(3), jnp.full(count, 4.0))
    sizes = jnp.floor(share * tokens).astype(jnp.int32)
    sizes = sizes.at[-1].add(tokens - sizes.sum())
    lhs, rhs = normal(0, tokens, width), normal(1, count, width, 2 * inner, scale=width**-0.5)
    bias = normal(2, count, 2 * inner)

    def oss(lhs: jax.Array, rhs: jax.Array, bias: jax.Array, platform: str | None = None) -> jax.Array:
        options = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
        return gated_grouped_matmul(lhs, rhs, sizes, rhs_bias=bias, platform=platform, **options)

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return gated_grouped_matmul(lhs, rhs, sizes)

    return f"M{tokens} E{count} K{width} F{inner}", oss, (lhs, rhs, bias), plain, (lhs, rhs)


def loss(small: bool) -> tuple[str, Call, tuple[Any, ...], Call, tuple[Any, ...]]:
    """The fused loss, whose gradients take three products of tokens, width and vocabulary, against these alone."""
    tokens, width, words, chunk = (64, 16, 200, 32) if small else (32768, 4096, 128256, 4096)
    hidden, weight = normal(0, tokens, width), normal(1, width, words, scale=width**-0.5)
    targets = jax.random.randint(jax.random.key(2), (tokens,), 0, words)

    def fused(hidden: jax.Array, weight: jax.Array, platform: str | None = None) -> jax.Array:
        options = {"chunk_strategy": "token", "platform": platform}
        return fused_cross_entropy(hidden=hidden, lm_head_weight=weight, targets=targets, **options).loss

    def products(hidden: jax.Array, weight: jax.Array) -> Any:
        def step(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = rows @ weight
            total = total + jnp.einsum("td,tv->dv", rows, logits, preferred_element_type=jnp.float32)
            return total, logits @ weight.T

        start = jnp.zeros(weight.shape, jnp.float32)
        return jax.lax.scan(step, start, hidden.reshape(-1, chunk, width))

    return f"T{tokens} D{width} V{words}", fused, (hidden, weight), products, (hidden, weight)


def total(call: Call) -> Call:
    """Call -> its value and the gradients of all floating arguments."""

    def run(*arrays: Any) -> Any:
        output, pullback = jax.vjp(call, *arrays)
        return output, pullback(jnp.ones_like(output) if output.ndim == 0 else (output / 8).astype(output.dtype))

    return run


def check(call: Call, arrays: tuple[Any, ...]) -> float:
    """Returns the largest error of a small call and its gradients, in parts of the largest entry of each array.

    The other side is XLA's in float32, with products of the highest precision.
    """
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    with jax.default_matmul_precision("highest"):
        expected = jax.tree.leaves(jax.jit(total(functools.partial(call, platform="xla")))(*wide))
    pairs = zip(jax.tree.leaves(jax.jit(total(call))(*arrays)), expected, strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)


def rows(quick: bool, checks_alone: bool) -> Iterator[list[str]]:
    """Yields the lines of the table."""
    for name, make in (("delta rule", delta_rule), ("experts", experts), ("loss", loss)):
        _, call, arrays, _, _ = make(small=True)
        off = check(call, arrays)
        if not off < 0.05:
            raise AssertionError(f"{name}: an error of {off:.3g} of the largest entry")
        if checks_alone:
            yield [name, "small", "with gradients", "right", "", ""]
            continue
        sizes, call, arrays, plain, plain_arrays = make(small=False)
        for which in ("with gradients",) if name == "loss" else ("forward", "with gradients"):
            variant, other = (call, plain) if which == "forward" else (total(call), total(plain))
            if name == "loss":
                other = plain
            sides = {"variant": compiled(variant, arrays), "plain": compiled(other, plain_arrays)}
            times = shared.turns.time_in_turns(sides, 3 if quick else 7)
            ratio = times["variant"] / times["plain"]
            yield [name, sizes, which, *(f"{times[side] * 1e3:.3f}" for side in sides), f"{ratio:.3f}"]


def compiled(call: Call, arrays: tuple[Any, ...]) -> shared.turns.TimedCall:
    """Returns a call without arguments."""
    program = jax.jit(call).lower(*arrays).compile()
    return lambda: program(*arrays)


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__, {"--quick": "few rounds", "--check": "small calls on any device, no times"}
    )
    shared.report.print_rows_as_measured(COLUMNS, rows(options.quick, options.check))


if __name__ == "__main__":
    main()
