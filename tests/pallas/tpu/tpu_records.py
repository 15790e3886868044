"""Records of the tiled softmax family, small and awkward, and the family's own answers for them."""

import dataclasses
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu  # noqa: TID251

from ejkernel.families.tiled_attention import TiledAttention, reference
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.sparse_masks import ChunkedCausalMask, LocalMask, MultiHeadMask, NumpyMask
from ejkernel_pallas.tpu.interpret import INTERPRET_VARIABLE
from ejkernel_pallas.tpu.tiled_attention.config import GradientTile, TpuBackward, TpuForward

FORWARD = TpuForward(block_q=128, block_kv=128, chunk_q=128, chunk_kv=128)
BACKWARD = TpuBackward(
    dkv=GradientTile(block_q=128, block_kv=128), dq=GradientTile(block_q=128, block_kv=128), chunk=128
)


def record(shape=(1, 160, 160, 2, 1, 64, 64), dtype="float32", **fields):
    """A record of (B, T, S, H, Hk, D, Dv) with normal inputs; fields that are functions get a generator."""
    b, t, s, h, hk, d, dv = shape
    random = np.random.default_rng(7)
    query, key, value = (
        jnp.asarray(random.normal(size=size), dtype) for size in ((b, t, h, d), (b, s, hk, d), (b, s, hk, dv))
    )
    made = {name: x(random) if callable(x) else x for name, x in fields.items()}
    return TiledAttention(query=query, key=key, value=value, softmax_scale=made.pop("softmax_scale", d**-0.5), **made)


def normal(*size):
    return lambda random: jnp.asarray(random.normal(size=size), jnp.float32)


def chance(*size):
    return lambda random: jnp.asarray(random.random(size=size) < 0.7)


def ids(b, *lengths):
    """Segments of the given lengths, the last of which is padding."""
    made = np.concatenate([np.full(n, i if i + 1 < len(lengths) else -1) for i, n in enumerate(lengths)])
    return jnp.asarray(np.broadcast_to(made, (b, made.size)), jnp.int32)


def places(*size):
    return lambda random: jnp.asarray(random.integers(0, 300, size=size), jnp.int32)


def hiding(*size):
    """A bias that hides the first tile of keys from some queries, by the least number there is, and one key by more."""

    def made(random):
        bias = random.normal(size=size).astype(np.float32)
        bias[..., 3:90, :128] = np.finfo(np.float32).min
        bias[..., 7] = -np.inf
        return jnp.asarray(bias)

    return made


def by_head(queries, keys):
    """Patterns of four heads, two of which share theirs."""
    shape = (queries, keys)
    scattered = NumpyMask(np.random.default_rng(5).random(shape) < 0.3)
    return MultiHeadMask(
        (LocalMask(shape, (40, 10)), ChunkedCausalMask(shape, 100), scattered, LocalMask(shape, (40, 10)))
    )


def functions(queries, keys, heads):
    """`score_mod` with arrays by head, query and key, and a `mask_mod` of documents; some queries are in none."""
    random = np.random.default_rng(11)
    slopes, biases = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((heads,), (2, keys)))
    documents = jnp.asarray(np.sort(random.integers(0, 3, (2, max(queries, keys)))), jnp.int32)
    score = score_function(
        "score_mod",
        lambda s, b, h, q, k: jnp.where(k == q, s, s * (1 + slopes[h]) - 0.01 * jnp.abs(q - k)) + biases[b, k],
        jnp.float32,
    )
    mask = mask_function("mask_mod", lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q != 3))
    return {"score_mod": lambda _: score, "mask_mod": lambda _: mask}


def causal_function(masked=-jnp.inf):
    """A `mask_mod` that is a causal mask, and a `score_mod` without arrays that masks some pairs itself."""
    score = score_function("score_mod", lambda s, b, h, q, k: jnp.where((q - k) % 9 == 1, masked, s), jnp.float32)
    return {
        "mask_mod": lambda _: mask_function("mask_mod", lambda b, h, q, k: q - k >= 0),
        "score_mod": lambda _: score,
    }


def distances():
    """A `score_mod` and a `mask_mod` that convert differences of indices, of both signs, to float32."""
    slopes = jnp.asarray(np.random.default_rng(13).random(2), jnp.float32)

    def score(s, b, h, q, k):
        return s - slopes[h] * jnp.abs(q - k) + 0.1 * jnp.sin(k - q) * jnp.exp(-0.02 * jnp.square(1.0 * (q - k)))

    return {
        "score_mod": lambda _: score_function("score_mod", score, jnp.float32),
        "mask_mod": lambda _: mask_function("mask_mod", lambda b, h, q, k: jnp.cos((q - k) / 7) > slopes[h] - 1),
    }


LONG = (1, 300, 300, 1, 1, 32, 32)
CASES = {
    "plain": record((2, 130, 150, 2, 2, 32, 32)),
    "one key": record((1, 3, 1, 2, 1, 64, 64)),
    "one query": record((1, 1, 129, 2, 1, 60, 60)),
    "causal": record((1, 300, 300, 2, 1, 128, 128), causal=True),
    "causal, fewer keys": record((1, 290, 140, 1, 1, 32, 32), causal=True),
    "window to the left": record((1, 400, 400, 1, 1, 32, 32), sliding_window=(30, None), causal=True),
    "segments": record(
        (2, 300, 300, 2, 1, 32, 32), q_segment_ids=ids(2, 100, 150, 50), kv_segment_ids=ids(2, 90, 160, 50)
    ),
    "segments that nobody shares": record(
        (1, 130, 140, 1, 1, 32, 32),
        q_segment_ids=jnp.full((1, 130), 1, jnp.int32),
        kv_segment_ids=jnp.full((1, 140), 2, jnp.int32),
    ),
    "positions": record(LONG, causal=True, q_positions=places(1, 300), kv_positions=places(1, 300)),
    "mask": record((2, 140, 260, 2, 1, 32, 32), mask=chance(2, 1, 140, 260)),
    "mask of keys": record((2, 130, 150, 2, 1, 32, 32), mask=chance(2, 1, 1, 150)),
    "mask of keys by heads": record((2, 130, 150, 2, 1, 32, 32), mask=chance(2, 2, 1, 150)),
    "mask of queries by heads": record((2, 130, 150, 2, 1, 32, 32), mask=chance(2, 2, 130, 1)),
    "bias": record((2, 140, 260, 2, 1, 32, 32), bias=normal(1, 2, 140, 260)),
    "bias of keys": record((2, 130, 150, 2, 1, 32, 32), bias=normal(2, 1, 1, 150)),
    "bias of queries": record((2, 130, 150, 2, 1, 32, 32), bias=normal(1, 2, 130, 1)),
    "bias that hides": record((1, 140, 260, 1, 1, 32, 32), bias=hiding(1, 1, 140, 260)),
    "pattern": record((1, 300, 300, 1, 1, 32, 32), pattern=LocalMask((300, 300), (150, 0))),
    "patterns by head": record(
        (2, 140, 260, 4, 2, 32, 32), pattern=by_head(140, 260), bias=normal(1, 4, 140, 260), sliding_window=(100, None)
    ),
    "soft cap": record((1, 130, 150, 2, 1, 32, 32), logits_soft_cap=2.0, causal=True),
    "functions of a shard": record(
        (1, 140, 150, 2, 1, 32, 32),
        **functions(160, 160, 3),
        logits_soft_cap=3.0,
        bias=normal(1, 2, 140, 1),
        dropout_origin=jnp.asarray([1, 1, 20, 10], jnp.int32),
    ),
    "functions without arrays": record((1, 300, 300, 1, 1, 32, 32), **causal_function()),
    "functions of distances": record((1, 290, 300, 2, 1, 32, 32), **distances(), causal=True),
    "sinks": record((2, 130, 150, 2, 1, 32, 32), softmax_aux=normal(2), causal=True),
    "sinks alone": record((1, 130, 140, 2, 1, 32, 32), softmax_aux=normal(2), mask=jnp.zeros((1, 1, 130, 140), bool)),
    "values longer": record((1, 130, 150, 2, 1, 32, 192), causal=True),
    "values shorter": record((1, 130, 150, 2, 1, 192, 64), causal=True),
    "group": record((1, 130, 150, 4, 2, 60, 60), causal=True),
    "256": record((1, 130, 130, 1, 1, 256, 256), causal=True),
    "heads in place": record((2, 140, 260, 4, 2, 128, 128), sliding_window=(60, 0)),
    "dropout": record((2, 130, 150, 2, 1, 32, 32), dropout_prob=0.3, dropout_seed=jnp.uint32(5)),
    "everything": record(
        (2, 270, 300, 4, 2, 60, 32),
        causal=True,
        sliding_window=(150, 50),
        q_segment_ids=ids(2, 100, 150, 20),
        kv_segment_ids=ids(2, 90, 160, 50),
        mask=chance(2, 1, 270, 300),
        bias=normal(1, 4, 270, 300),
        logits_soft_cap=5.0,
        softmax_aux=normal(4),
        dropout_prob=0.2,
        dropout_seed=jnp.uint32(9),
        dropout_origin=jnp.asarray([1, 2, 3, 4], jnp.int32),
    ),
    "bfloat16": record((1, 300, 300, 2, 1, 128, 128), "bfloat16", causal=True),
    "bfloat16, padding and sinks": record(
        (1, 150, 150, 2, 1, 64, 32),
        "bfloat16",
        q_segment_ids=ids(1, 60, 70, 20),
        kv_segment_ids=ids(1, 60, 70, 20),
        softmax_aux=normal(2),
    ),
}


def answers(made):
    """Output, lse and a cotangent's gradients of every differentiable field, by the family's reference."""
    fields = {
        name: getattr(made, name)
        for name in ("query", "key", "value", "bias", "softmax_aux", "score_mod")
        if getattr(made, name) is not None
    }
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), fields)

    def outcome(fields):
        output, residuals = reference(dataclasses.replace(made, **fields))
        return output, residuals.lse

    output, pull, lse = jax.vjp(outcome, wide, has_aux=True)
    cotangent = jnp.asarray(np.random.default_rng(3).normal(size=output.shape), made.query.dtype)
    return output, lse, cotangent, pull(cotangent.astype(jnp.float32))[0]


def interpreted():
    """Kernels on the CPU, one operation after another, with blocks beyond an array's end full of NaN."""
    return mock.patch.dict(os.environ, {INTERPRET_VARIABLE: "1"})


def simulated():
    """Kernels on the CPU with copies and memories as a TPU has them, watched for races; slower by far."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    return pltpu.force_tpu_interpret_mode(params)


def close(got, wanted, dtype):
    """Asserts equality up to what the dtype rounds; infinities are where they should be."""
    bound = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(wanted, np.float32), rtol=bound, atol=bound, equal_nan=False
    )
