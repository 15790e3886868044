"""Mean pooling on a CPU against `jnp.mean` and `jax.ops.segment_sum`.

python benchmarks/segment_pooling/mean_pooling_cpu.py [--quick]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.modules import mean_pooling

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides


def rows(x):
    return jnp.mean(x, axis=1)


def chunks(x):
    return jnp.mean(x.reshape(x.shape[0], -1, 64, *x.shape[2:]), axis=2)


def packed(x, lengths):
    pools = lengths.shape[0] - 1
    ids = jnp.searchsorted(lengths[1:], jnp.arange(x.shape[0]), side="right")
    sums = jax.ops.segment_sum(x, ids, pools, indices_are_sorted=True)
    return sums / jnp.maximum(jnp.diff(lengths), 1)[:, None]


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    tokens, repeats = (2048, 3) if options.quick else (16384, 15)
    shared.sides.print_table_header("jnp")
    x = jax.random.normal(jax.random.key(0), (tokens, 1024))
    shared.sides.print_comparison(
        f"4 x {tokens // 4} tokens", mean_pooling, rows, (x.reshape(4, -1, 1024),), (0,), repeats
    )
    heads = x.reshape(4, -1, 8, 128)
    ours = lambda x: mean_pooling(x, chunk_size=64)  # noqa: E731
    shared.sides.print_comparison(f"4 x {tokens // 4} tokens, chunks of 64", ours, chunks, (heads,), (0,), repeats)
    for sequences in (8, 128):
        ends = jnp.sort(jax.random.randint(jax.random.key(1), (sequences - 1,), 0, tokens))
        lengths = jnp.concatenate([jnp.zeros(1, int), ends, jnp.full(1, tokens)])
        shared.sides.print_comparison(
            f"{tokens} tokens in {sequences} sequences", mean_pooling, packed, (x, lengths), (0,), repeats
        )


if __name__ == "__main__":
    main()
