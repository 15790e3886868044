"""Compares interpreted kernels of token-sparse attention with XLA's where sizes are awkward; run by a test alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import token_sparse_attention

# Queries, keys, query and KV heads, head and value sizes, listed keys: heads that fill no tile, rows in two tiles, a
# list longer than the keys; the latent form with a value that is its key's first tile, and one that is not.
SHAPES = [(7, 29, 6, 2, 20, 12, 21), (5, 11, 17, 1, 48, 32, 33), (6, 40, 4, 1, 40, 24, 9)]


def main():
    for tokens, num_keys, heads, kv_heads, size, value_size, count in SHAPES:
        keys = jax.random.split(jax.random.key(tokens), 6)
        is_latent = kv_heads == 1
        arrays = {
            "query": jax.random.normal(keys[0], (2, tokens, heads, size)),
            "key": jax.random.normal(keys[1], (2, num_keys, kv_heads, size)),
            "softmax_aux": jax.random.normal(keys[2], (heads,)),
        }
        options = {"softmax_scale": 0.3, "return_lse": True}
        if is_latent:
            options["value_size"] = value_size
        else:
            arrays["value"] = jax.random.normal(keys[3], (2, num_keys, kv_heads, value_size))
        # Empty entries between others, and keys that are listed several times.
        lists = (2, tokens, count) if is_latent else (2, tokens, kv_heads, count)
        indices = jax.random.randint(keys[4], lists, -3, num_keys).at[0, 2].set(-1)

        def call(arrays, platform, options=options, indices=indices):
            given = {"value": None, **arrays}
            return token_sparse_attention(indices=indices, **given, **options, platform=platform)

        def both(platform, arrays, call=call):
            (output, lse), pull = jax.vjp(functools.partial(call, platform=platform), arrays)
            cotangents = jnp.cos(jnp.arange(output.size)).reshape(output.shape), jnp.where(lse == -jnp.inf, 0.0, 0.1)
            return output, lse, pull(cotangents)[0]

        # Neither keys that no query lists nor a query that lists none reach a result.
        is_listed = (indices.reshape(2, 1, -1) == jnp.arange(num_keys)[:, None]).any(axis=-1)[..., None, None]
        with_nan = {"query": arrays["query"].at[0, 2].set(jnp.nan)}
        with_nan |= {n: jnp.where(is_listed, x, jnp.nan) for n, x in arrays.items() if n in ("key", "value")}
        run = jax.jit(both, static_argnums=0)
        got, want = run("triton", arrays | with_nan), run("xla", arrays)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=3e-5, rtol=1e-4, err_msg=f"{tokens} {jax.tree_util.keystr(path)}")
        print("same", tokens)


if __name__ == "__main__":
    main()
