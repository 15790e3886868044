"""The attention kernels compiled for real chips by their own compiler, which needs none of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import CHIPS, compiled, shaped

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.tiled_attention.backward import backward
from ejkernel_pallas.tpu.tiled_attention.config import GradientTile, TpuBackward, TpuForward
from ejkernel_pallas.tpu.tiled_attention.forward import forward

pytestmark = pytest.mark.needs("libtpu")

SMALL = TpuForward(block_q=256, block_kv=256, chunk_q=256, chunk_kv=256)
SMALL_BACKWARD = TpuBackward(
    dkv=GradientTile(block_q=256, block_kv=256), dq=GradientTile(block_q=256, block_kv=256), chunk=256
)


def plain(b, t, h, hk, d, dtype="bfloat16"):
    return TiledAttention(
        query=shaped((b, t, h, d), dtype),
        key=shaped((b, t, hk, d), dtype),
        value=shaped((b, t, hk, d), dtype),
        softmax_scale=d**-0.5,
        causal=True,
    )


def functions(b, s, h):
    """`score_mod` with a slope by head and a term by key, `mask_mod` of documents."""
    slopes, terms, documents = jnp.ones((h,)), jnp.ones((b, s)), jnp.ones((b, s), jnp.int32)
    score = score_function("score_mod", lambda x, b, h, q, k: x - slopes[h] * jnp.abs(q - k) + terms[b, k], jnp.float32)
    mask = mask_function("mask_mod", lambda b, h, q, k: (documents[b, q] == documents[b, k]) | (k < 8 * h))
    made = {"score_mod": score, "mask_mod": mask}
    return jax.tree.map(lambda x: shaped(x.shape, x.dtype), made)


def everything(b, t, s, h, hk, d, dv):
    return TiledAttention(
        query=shaped((b, t, h, d)),
        key=shaped((b, s, hk, d)),
        value=shaped((b, s, hk, dv)),
        softmax_scale=0.1,
        bias=shaped((b, h, t, s), "float32"),
        mask=shaped((b, 1, t, s), "bool"),
        q_segment_ids=shaped((b, t), "int32"),
        kv_segment_ids=shaped((b, s), "int32"),
        q_positions=shaped((b, t), "int32"),
        kv_positions=shaped((b, s), "int32"),
        softmax_aux=shaped((h,), "float32"),
        dropout_seed=shaped((), "uint32"),
        dropout_prob=0.1,
        causal=True,
        sliding_window=(100, 20),
        logits_soft_cap=30.0,
        **functions(b, s, h),
    )


def gradients(params, wanted, record, output, cotangent, lse):
    residuals = SoftmaxResiduals(lse=lse)
    pullback = Pullback(record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=wanted)
    return backward(pullback, params)


def compile_both(record, name, params=(SMALL, SMALL_BACKWARD)):
    """Both passes; their programs."""
    (b, t, h, _), dv = record.query.shape, record.value.shape[3]
    fields = {
        x for x in ("query", "key", "value", "bias", "softmax_aux", "score_mod") if getattr(record, x) is not None
    }
    output, lse = shaped((b, t, h, dv), record.query.dtype), shaped((b, h, t), "float32")
    there = compiled(lambda record: forward(record, params[0]), (record,), name)
    back = compiled(functools.partial(gradients, params[1], frozenset(fields)), (record, output, output, lse), name)
    return there, back


@pytest.mark.parametrize("name", CHIPS)
def test_all_fields_compile_at_awkward_shapes(name):
    for made in compile_both(everything(2, 270, 300, 4, 2, 60, 40), name):
        assert "tpu_custom_call" in made.as_text()


def test_attention_of_a_model_compiles_in_linear_memory():
    """Llama 3's attention: no array of queries by keys, and nothing that the kernels would have to be fed from.

    The tiles that every chip gets by default are compiled for it in `test_schedules.py`.
    """
    record = plain(1, 8192, 32, 8, 128)
    for made in compile_both(record, "v5e", (TpuForward(), TpuBackward())):
        assert made.memory_analysis().temp_size_in_bytes < 8 * record.query.size * 2


@pytest.mark.parametrize("size", [32, 64, 96, 256])
def test_float32_and_head_sizes_compile(size):
    compile_both(plain(1, 300, 2, 1, size, "float32"), "v5e")
