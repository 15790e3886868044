"""What the TPU kernels of attention refuse, and that the sentence says it."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.tiled_attention import FAMILY, TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import refusals
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.sparse_masks import CausalMask
from ejkernel_pallas.tpu.tiled_attention import implementations

CHIP = DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite")
(IMPLEMENTATION,) = implementations()


def reasons(length=256, size=64, dtype="bfloat16", device=CHIP, **fields):
    array = jax.ShapeDtypeStruct((1, length, 2, size), jnp.dtype(dtype))
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=0.1, **fields)
    return list(refusals(FAMILY, IMPLEMENTATION, record, device, "auto", "forward", frozenset()))


TABLE = jnp.zeros((2, 21))


def score(function):
    return {"score_mod": score_function("score_mod", function, jnp.float32)}


def test_plain_calls_are_not_refused():
    assert reasons() == reasons(causal=True, length=2**18) == reasons(sliding_window=(1024, 0), length=2**22) == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"normalize_output": False}, "normalize_output is not handled"),
        ({"logits_dtype": jnp.dtype("bfloat16")}, "logits_dtype is not handled"),
        ({"dtype": "float16"}, "dtype float16 is not among bfloat16, float32"),
        ({"size": 320}, "head size 320 is not in range(1, 257)"),
        ({"length": 0}, "query is empty"),
        ({"length": 2**20}, "query: got 1048576 tile pairs, the kernels take at most 131072, which fit scalar memory"),
        ({"device": DeviceInfo(platform="cpu")}, "needs tpu, this is cpu"),
        (
            {"pattern": CausalMask((300, 300))},
            "pattern: pattern of 300 queries has no even parts of 256 queries and 2 heads",
        ),
        (
            score(lambda s, b, h, q, k: s + TABLE[h, jnp.clip(q - k, 0, 20)]),
            "score_mod: got an array float32[2,21] indexed by query and key together, the kernels index arrays by one "
            "of them",
        ),
        (
            score(lambda s, b, h, q, k: jax.lax.cond(q > k, lambda: s, lambda: s + TABLE[h, 0])),
            "score_mod: got cond of both query and key or of the score, which the kernels do not have",
        ),
        (
            score(lambda s, b, h, q, k: jax.lax.lgamma(s)),
            "score_mod: got lgamma of both query and key or of the score, which the kernels do not have",
        ),
        (
            score(lambda s, b, h, q, k: s.astype(jnp.bfloat16) * 2),
            "score_mod: got values of bfloat16 for pairs, the kernels have float32, int32, bool",
        ),
        (
            score(lambda s, b, h, q, k: sum(((n + 1) * k * TABLE[h, n] for n in range(17)), s)),
            "score_mod: got 17 values of a head, query or key, the kernels take at most 16",
        ),
        (
            {"mask_mod": mask_function("mask_mod", lambda b, h, q, k: (k < 8 * h) | (k <= q)), "length": 2**19},
            "query: got 524288 tile pairs, the kernels take at most 131072, which fit scalar memory",
        ),
    ],
)
def test_refused_calls_name_their_reason(call, sentence):
    assert reasons(**call) == [sentence]
