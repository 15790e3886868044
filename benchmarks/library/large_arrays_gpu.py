"""Calls on arrays of more than 2^31 elements, whose ends are compared with small calls on the same numbers.

python benchmarks/library/large_arrays_gpu.py [--platform triton|pallas|xla]
"""

import argparse

import jax
import jax.numpy as jnp

from ejkernel.modules import causal_conv1d, flash_attention, gla_attention, grouped_matmul, unified_attention


def normal(seed: int, *shape: int) -> jax.Array:
    """Numbers of 16 bits, cheaper than normal ones."""
    counter = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(2654435761 + seed)
    for axis in range(len(shape) - 1):
        counter = counter ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(2246822519 + 2 * axis))
    return ((counter >> 16) % 2001).astype(jnp.bfloat16) / 1000 - 1


def attention(platform: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """One row of more than 2^31 elements: queries, keys, values, outputs and all gradients."""
    tokens, heads, size, few = 2**16 + 64, 256, 128, 2
    query, key, value = (normal(seed, 1, tokens, heads, size) for seed in range(3))

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        options = {"causal": True, "sliding_window": (127, 0)}
        output = flash_attention(query, key, value, **options, platform=platform)
        return jnp.sum(output.astype(jnp.float32) ** 2)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)
    last = [x[:, -1024:, -few:] for x in (query, key, value)]
    small = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*last)
    # Of the last 1024 tokens the first 128 see keys before them.
    pairs = zip(("query", "key", "value"), gradients, small, strict=True)
    return {name: (x[:, -512:, -few:], y[:, -512:]) for name, x, y in pairs}


def recurrence(platform: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Three batch rows, of which the last begins beyond 2^31."""
    heads = 2048
    arrays = [normal(seed, 3, 4096 + 64, heads, 128) for seed in range(3)]
    run = jax.jit(lambda q, k, v: gla_attention(q, k, v, -jnp.ones_like(k) / 8, platform=platform))
    return {"gla_attention": (run(*arrays)[-1:, :, -2:], run(*(x[-1:, :, -2:] for x in arrays)))}


def convolution(platform: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """A long row of channels."""
    x, weight = normal(0, 1, 2**20 + 64, 2049), normal(1, 2049, 4)
    run = jax.jit(lambda x, w: causal_conv1d(x, w, platform=platform))
    return {"causal_conv1d": (run(x, weight)[:, -100:], run(x[:, -200:], weight)[:, -100:])}


def experts(platform: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """More than 2^31 elements of rows and of matrices."""
    lhs, rhs = normal(0, 2**19 + 64, 4096), normal(1, 130, 4096, 4096)
    sizes = jnp.full(130, (2**19 + 64) // 130, jnp.int32).at[-1].add((2**19 + 64) % 130)
    run = jax.jit(lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, platform=platform))
    small = run(lhs[-100:], rhs[-1:], jnp.array([100]))
    return {"grouped_matmul": (run(lhs, rhs, sizes)[-100:], small)}


def pages(platform: str) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Caches of more than 2^31 elements each, of which the last pages are read."""
    count, few = 2**15 + 64, 64
    keys, values = (normal(seed, count, 64, 8, 128) for seed in range(2))
    query = normal(2, 9, 32, 128)
    tables, lengths, starts = (
        jnp.arange(few).reshape(4, 16),
        jnp.array([1024, 1000, 3, 700]),
        jnp.array([0, 1, 2, 3, 9]),
    )
    run = jax.jit(lambda k, v, tables: unified_attention(query, k, v, lengths, tables, starts, platform=platform))
    small = run(keys[-few:], values[-few:], tables)
    return {"unified_attention": (run(keys, values, tables + count - few), small)}


def main() -> None:
    """Prints, for each array, the largest difference beside the largest number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="triton")
    platform = parser.parse_args().platform
    for check in (attention, recurrence, convolution, experts, pages):
        try:
            found = check(platform)
        except NotImplementedError as error:
            print(f"{check.__name__:14} {platform}: refused, {str(error).splitlines()[0]}")
            continue
        for name, (got, want) in found.items():
            wide = got.astype(jnp.float32), want.astype(jnp.float32)
            difference, largest = float(jnp.max(jnp.abs(wide[0] - wide[1]))), float(jnp.max(jnp.abs(wide[1])))
            verdict = "ok" if difference <= 0.02 * largest else "WRONG"
            print(f"{check.__name__:14} {name:16} {platform}: {difference:.2e} of {largest:.2e}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
