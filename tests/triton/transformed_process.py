"""Transformed calls of the interpreted Triton kernels, and hidden rows, against XLA; run by `test_interpreted.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import FlashAttentionConfig, blocksparse_attention, flash_attention
from ejkernel.types import MaskInfo
from ejkernel.types.sparse_masks import ChunkedCausalMask, LocalMask
from ejkernel_triton import interpreter
from ejkernel_triton.tiled_attention.config import GradientTile, TritonBackward, TritonForward

SPEC = PartitionSpec("rows", None, "heads", None)


def gradients(platform, **sharded):
    def loss(query, key, value, sinks):
        options = {"causal": True, "dropout_prob": 0.2, "dropout_seed": 5, "platform": platform}
        output = flash_attention(query, key, value, None, None, None, sinks, **options, **sharded)
        return (output * output).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 48, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16))
    query, key, value = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))
    sinks = jnp.ones((4, 1))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "heads"))
    want = gradients("xla")(query, key, value, sinks)
    got = gradients("triton", mesh=mesh, in_specs=(SPEC, SPEC, SPEC), out_specs=SPEC)(query, key, value, sinks)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)

    def slope(platform, wrap):
        call = wrap(lambda query: flash_attention(query, key, value, platform=platform, causal=True))
        return jax.jit(jax.grad(lambda query: (call(query) ** 2).sum()))(query)

    np.testing.assert_allclose(slope("triton", jax.checkpoint), slope("xla", lambda f: f), rtol=2e-5, atol=2e-5)
    pattern_by_parts(mesh)
    functions_by_parts(mesh, query, key, value)
    mapped(query, key, value)
    hidden(query, key, value)
    long_rows()


def pattern_by_parts(mesh):
    """A pattern by head, of which each device has its own heads and queries."""
    keys = jax.random.split(jax.random.key(5), 3)
    query, key, value = (jax.random.normal(k, (1, heads, 32, 16)) for k, heads in zip(keys, (4, 2, 2), strict=True))

    def pattern(queries, keys, heads, head, _):
        return LocalMask((queries, keys), (9, 2)) if head % 2 else ChunkedCausalMask((queries, keys), 12)

    def loss(options, *arrays):
        return (blocksparse_attention(*arrays, mask_builder=pattern, causal=False, **options) ** 2).sum()

    split, whole = PartitionSpec(None, "heads", "rows", None), PartitionSpec(None, "heads", None, None)
    sharded = {"platform": "triton", "mesh": mesh, "in_specs": (split, whole, whole), "out_specs": split}
    want = jax.jit(jax.grad(functools.partial(loss, {"platform": "xla"}), (0, 1, 2)))(query, key, value)
    got = jax.jit(jax.grad(functools.partial(loss, sharded), (0, 1, 2)))(query, key, value)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def functions_by_parts(mesh, query, key, value):
    """Functions of pairs whose indices are those of the whole call, and their gradients, in shards."""
    lengths, slopes = jnp.array([30, 41]), jnp.arange(1.0, 5.0)

    def loss(query, key, value, slopes, **sharded):
        def score_mod(score, b, h, q_idx, k_idx):
            return 2 * jnp.tanh(score / 2) * slopes[h] - b * jnp.abs(q_idx - k_idx) ** 0.5

        mask = {"mask_mod": lambda b, h, q_idx, k_idx: (k_idx <= q_idx + 4 * h) & (k_idx < lengths[b] - q_idx % 2)}
        return (flash_attention(query, key, value, score_mod=score_mod, **mask, **sharded) ** 2).sum()

    sharded = {"platform": "triton", "mesh": mesh, "in_specs": (SPEC, SPEC, SPEC), "out_specs": SPEC}
    want = jax.jit(jax.grad(functools.partial(loss, platform="xla"), (0, 1, 2, 3)))(query, key, value, slopes)
    got = jax.jit(jax.grad(functools.partial(loss, **sharded), (0, 1, 2, 3)))(query, key, value, slopes)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


def mapped(query, key, value):
    """`vmap` over some of the arrays, twice, with a bias that rows share: one longer batch for the kernels."""
    seeds = jnp.arange(2, dtype=jnp.uint32)
    biases = jax.random.normal(jax.random.key(3), (2, 1, 4, 48, 48))
    ids = jnp.where(jnp.arange(48) < jnp.array([[40], [48]]), 0, -1)
    masked = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)

    def loss(platform, query, key, bias, seed):
        options = {"dropout_prob": 0.2, "dropout_seed": seed, "platform": platform}
        return (flash_attention(query, key, value, bias, mask_info=masked, **options) ** 2).sum()

    def nested(platform):
        graded = jax.value_and_grad(functools.partial(loss, platform), (0, 1, 2))
        over_biases = jax.vmap(graded, (None, None, 0, None))
        over_queries = jax.vmap(over_biases, (0, None, None, 0))
        return jax.jit(over_queries)(jnp.stack([query, -query]), key, biases, seeds)

    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=3e-5, atol=3e-5), nested("triton"), nested("xla"))

    runs, run = [], interpreter.run
    interpreter.run = lambda *launch: runs.append(launch[0]) or run(*launch)
    forward = jax.vmap(lambda query: flash_attention(query, key, value, platform="triton"))
    jax.block_until_ready(jax.jit(forward)(jnp.stack([query, -query])))
    assert len(runs) == 1


def hidden(query, key, value):
    """Rows that a bias hides altogether attend evenly where it is the least number there is, and to nothing at -inf."""
    least = jnp.finfo(jnp.float32).min
    bias = jnp.zeros((1, 1, 48, 48)).at[..., 5, :].set(least).at[..., 6, :].set(-jnp.inf).at[..., 7, :20].set(least)

    def loss(platform, normalize, *arrays):
        output = flash_attention(*arrays, platform=platform, normalize_output=normalize)
        return (output**2).sum(), output

    for normalize in (True, False):
        got, want = (
            jax.jit(jax.value_and_grad(functools.partial(loss, platform, normalize), (0, 1, 2, 3), has_aux=True))(
                query, key, value, bias
            )
            for platform in ("triton", "xla")
        )
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=3e-5, atol=1e-4), got, want)


def long_rows():
    """Rows of float32 that are multiplied piece by piece, the last one shorter, beside padding that is no number."""
    keys = jax.random.split(jax.random.key(4), 4)
    shapes = ((1, 24, 2, 144), (1, 24, 1, 144), (1, 24, 1, 160), (1, 1, 24, 24))
    arrays = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    ids = jnp.where(jnp.arange(24) < 20, 0, -1)[None]
    real = (ids >= 0)[..., None, None]
    poisoned = [jnp.where(real, x, jnp.nan) for x in arrays[:3]] + arrays[3:]

    def loss(options, *arrays):
        masked = MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)
        return (flash_attention(*arrays, mask_info=masked, causal=True, **options) ** 2).mean(-1).sum()

    one = {"num_warps": 4, "num_stages": 1}
    parts = (
        TritonForward(block_q=16, block_kv=32, **one),
        TritonBackward(
            dkv=GradientTile(block_kv=16, block_q=32, **one),
            dq=GradientTile(block_q=16, block_kv=64, num_warps=8, num_stages=1),
        ),
    )
    pieces = {"platform": "triton", "cfg": FlashAttentionConfig.from_parts(*parts)}
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, options), (0, 1, 2, 3)))(*given)
        for options, given in ((pieces, poisoned), ({"platform": "xla"}, arrays))
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=3e-5, atol=1e-4), got, want)


if __name__ == "__main__":
    main()
