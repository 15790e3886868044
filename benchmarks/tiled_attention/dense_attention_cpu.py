"""Dense and block-sparse attention on a CPU against compositions of `jnp` and `jax.nn.dot_product_attention`.

python benchmarks/tiled_attention/dense_attention_cpu.py [--quick]
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import attention, blocksparse_attention, scaled_dot_product_attention
from ejkernel.types.sparse_masks import LocalMask, Mask, NumpyMask

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides


def composed(query, key, value):
    """Output and weights, all at once."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], key.shape[1], dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhts,bshv->bthv", weights, value), weights


def masked(pairs, query, key, value):
    """Heads first, with the pattern as a mask."""
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    return jax.nn.dot_product_attention(query, key, value, mask=pairs[None, None]).swapaxes(1, 2)


def patterns(length: int) -> dict[str, Mask]:
    """A window with a wide first column, and blocks that lie apart: one in eight."""
    shape, blocks = (length, length), np.random.default_rng(0).random((length // 256, length // 256)) < 1 / 8
    return {
        "window": LocalMask(shape, (512, 0)),
        "scattered": NumpyMask(np.kron(blocks, np.ones((256, 256), bool))) | LocalMask(shape, (0, 0)),
    }


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    repeats = 3 if options.quick else 9
    shared.sides.print_table_header("JAX")
    for length in (512,) if options.quick else (1024, 4096):
        query = jax.random.normal(jax.random.key(0), (1, length, 8, 64))
        key, value = jax.random.normal(jax.random.key(1), (2, 1, length, 2, 64))
        arrays = (query, key, value)
        ours = functools.partial(scaled_dot_product_attention, causal=True)
        theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        shared.sides.print_comparison(f"{length}, scaled dot product, causal", ours, theirs, arrays, (0, 1, 2), repeats)
        ours = functools.partial(attention, causal=True)
        shared.sides.print_comparison(f"{length}, with weights, causal", ours, composed, arrays, (0, 1, 2), repeats)
    for length in (1024,) if options.quick else (2048, 4096):
        query = jax.random.normal(jax.random.key(0), (1, 8, length, 64))
        key, value = jax.random.normal(jax.random.key(1), (2, 1, 2, length, 64))
        for name, pattern in patterns(length).items():
            ours = functools.partial(blocksparse_attention, mask_builder=pattern, causal=False)
            theirs = functools.partial(masked, pattern.allowed(0, 0, pattern.shape))
            arrays = (query, key, value)
            shared.sides.print_comparison(f"{length}, {name}", ours, theirs, arrays, (0, 1, 2), repeats)


if __name__ == "__main__":
    main()
