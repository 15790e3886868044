"""What the TPU kernels of attention refuse, and that the sentence says it."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.tiled_attention import FAMILY, TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import refusals
from ejkernel.types.sparse_masks import CausalMask
from ejkernel_pallas.tpu.tiled_attention import implementations

CHIP = DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite")
(IMPLEMENTATION,) = implementations()


def reasons(length=256, size=64, dtype="bfloat16", device=CHIP, **fields):
    array = jax.ShapeDtypeStruct((1, length, 2, size), jnp.dtype(dtype))
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=0.1, **fields)
    return list(refusals(FAMILY, IMPLEMENTATION, record, device, "auto", "forward", frozenset()))


def test_plain_calls_are_not_refused():
    assert reasons() == reasons(causal=True, length=2**18) == reasons(sliding_window=(1024, 0), length=2**22) == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"normalize_output": False}, "normalize_output is not handled"),
        ({"logits_dtype": jnp.dtype("bfloat16")}, "logits_dtype is not handled"),
        ({"dtype": "float16"}, "dtype float16 is not among bfloat16, float32"),
        ({"size": 320}, "head size 320, 320 is not in range(1, 257)"),
        ({"length": 0}, "query is empty"),
        ({"length": 2**20}, "query: got 1048576 tile pairs, the kernels take at most 131072, which fit scalar memory"),
        ({"device": DeviceInfo(platform="cpu")}, "needs tpu, this is cpu"),
        (
            {"pattern": CausalMask((300, 300))},
            "pattern: pattern of 300 queries has no even parts of 256 queries and 2 heads",
        ),
    ],
)
def test_refused_calls_name_their_reason(call, sentence):
    assert reasons(**call) == [sentence]
