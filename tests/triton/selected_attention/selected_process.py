"""Compares interpreted kernels of selected attention with XLA's where sizes are awkward; run by a test, by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import native_sparse_attention

# Tokens, query and KV heads, head and value sizes, tokens a block, blocks a query: blocks of several tiles of which the
# last is cut, and a group that is no power of two; one head for each, and more blocks than there are.
SHAPES = [(45, 6, 2, 12, 20, 20, 2), (19, 3, 3, 8, 8, 5, 9)]


def call(platform, options, arrays):
    return native_sparse_attention(**arrays, **options, platform=platform)


def main():
    for tokens, heads, kv_heads, size, value_size, block, count in SHAPES:
        keys = jax.random.split(jax.random.key(tokens), 6)
        rows, group = (1, tokens, heads), (1, tokens, kv_heads)
        shapes = {"query": (*rows, size), "key": (*group, size), "value": (*group, value_size)}
        shapes |= dict.fromkeys(("g_cmp", "g_slc"), rows)
        arrays = {name: jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=False)}
        cotangent = jax.random.normal(keys[5], (*rows, value_size))
        options = {"block_size": block, "block_counts": count}

        def both(platform, options=options, arrays=arrays, cotangent=cotangent):
            output, pull = jax.vjp(functools.partial(call, platform, options), arrays)
            return output, pull(cotangent)[0]

        got, want = (jax.jit(both, static_argnums=0)(platform) for platform in ("triton", "xla"))
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            assert jnp.isfinite(x).all()
            np.testing.assert_allclose(x, y, atol=3e-5, rtol=1e-4, err_msg=f"{tokens} {jax.tree_util.keystr(path)}")
        print("same", tokens)


if __name__ == "__main__":
    main()
