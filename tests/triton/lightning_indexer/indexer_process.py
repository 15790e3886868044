"""Compares interpreted kernels of the lightning indexer with the reference where sizes are awkward; run by a test
alone.

Rows are longer than a program holds, so all ways to find candidates are taken: from a sample that guesses well, and by
bisecting the row where most scores are equal. Numbers are multiples of 1/4, so scores are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.lightning_indexer import LightningIndexer, reference
from ejkernel.ops.device import current_device
from ejkernel_triton.lightning_indexer import config
from ejkernel_triton.lightning_indexer.forward import forward

# Queries, keys, heads, channels, K, largest quarters of keys, dtype.
SHAPES = [
    (3, 200, 3, 20, 5, 12, jnp.float32),
    (3, 130, 1, 16, 13, 1, jnp.bfloat16),
    (2, 90, 5, 33, 70, 12, jnp.float32),
]


def quarters(key, shape, limit):
    return jax.random.randint(key, shape, -limit, limit + 1) / 4


def make_record(tokens, num_keys, heads, size, top_k, limit, dtype):
    """Two batch rows with ranges of keys, an empty one among them, and numbers that are not finite."""
    keys = jax.random.split(jax.random.key(tokens), 5)
    query = quarters(keys[0], (2, tokens, heads, size), 8).astype(dtype)
    key = quarters(keys[1], (2, num_keys, size), limit).astype(dtype)
    weights = quarters(keys[2], (2, tokens, heads), 8)
    # NaN of both signs, infinities and both zeros, each in some row, and NaN where no query may select a key.
    key = key.at[0, 7].set(jnp.nan).at[0, 30].set(-jnp.nan).at[1, 11].set(jnp.inf).at[:, -1].set(jnp.nan)
    weights = weights.at[0, 1].set(-0.0).at[1, 0].set(-1.0).at[1, 1].set(jnp.inf)
    query = query.at[1, -1].set(jnp.nan)
    starts = jax.random.randint(keys[3], (2, tokens), 0, 9).at[1, 2:].set(num_keys)
    ends = jnp.minimum(num_keys - 1 - jax.random.randint(keys[4], (2, tokens), 0, 9), num_keys).at[0, 0].set(0)
    scaled = {"key_scales": quarters(keys[3], (2, num_keys), 4), "rectify": False} if heads == 1 else {}
    return LightningIndexer(
        query=query,
        key=key,
        weights=weights,
        key_starts=starts,
        key_ends=ends,
        top_k=top_k,
        softmax_scale=-0.5,
        **scaled,
    )


def main():
    for shape in SHAPES:
        record = make_record(*shape)
        chosen = config.heuristic(record, current_device(), "forward")
        got = jax.jit(functools.partial(forward, config=chosen))(record)[0]
        # Not compiled: compiled for a CPU, a maximum of NaN and 0 may be 0.
        for x, y in zip(got, reference(record)[0], strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"{shape}")
        print("same", shape)


if __name__ == "__main__":
    main()
