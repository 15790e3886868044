"""Which calls share an entry of a table of measured configurations."""

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.kinds import call_kind, tuning_key_of_large_calls
from ejkernel.types.sparse_masks import LocalMask


def call(length=8192, **features):
    array = jax.ShapeDtypeStruct((4, length, 16, 128), jnp.bfloat16)
    return TiledAttention(query=array, key=array, value=array, softmax_scale=0.1, **features)


def test_large_calls_of_one_kind_share_a_measured_configuration():
    assert call_kind(call(causal=True)) == "16 bits 128x128 mediumxmedium causal"
    assert call_kind(call(causal=True)) == call_kind(call(12000, causal=True, softmax_aux=jnp.ones(16)))
    ids = jnp.zeros((4, 8192), jnp.int32)
    others = [
        call(),
        call(causal=True),
        call(32768, causal=True),
        call(causal=True, sliding_window=(1023, 0)),
        call(causal=True, sliding_window=(100, 0)),
        call(causal=True, logits_soft_cap=30.0),
        call(causal=True, dropout_prob=0.1, dropout_seed=jnp.uint32(0)),
        call(causal=True, q_segment_ids=ids, kv_segment_ids=ids),
        call(pattern=LocalMask((8192, 8192), (100, 0))),
    ]
    assert len({call_kind(x) for x in others}) == len(others)


def test_a_call_too_small_to_fill_a_gpu_shares_no_configuration():
    assert tuning_key_of_large_calls(call(causal=True)) == call_kind(call(causal=True))
    assert tuning_key_of_large_calls(call(512)) is None
    assert tuning_key_of_large_calls(call(2048)) is None
