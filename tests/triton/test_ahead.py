"""The Triton kernels, with the tiles that are used when nobody chose, compiled to machine code for chips not here."""

import os

import jax
import jax.numpy as jnp
import pytest
import triton_chips
from jax import lax
from triton_chips import assert_fits, assert_fits_and_spills_nothing, on_chips

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel.types.sparse_masks import LocalMask
from ejkernel_triton import ahead, launch
from ejkernel_triton.tiled_attention import config
from ejkernel_triton.tiled_attention.backward import backward
from ejkernel_triton.tiled_attention.forward import forward
from ejkernel_triton.tiled_attention.forward_mode import forward_mode

L40S = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA L40S", compute_capability=8.9)
CHIPS = {**triton_chips.CHIPS, "sm_89": L40S}
BATCH, LENGTH, HEADS = 2, 2048, 4
IDS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
FEATURES = {
    "causal": {},
    "packed": {"q_segment_ids": IDS, "kv_segment_ids": IDS, "q_positions": IDS, "kv_positions": IDS},
    "masked": {"mask": jax.ShapeDtypeStruct((BATCH, 1, LENGTH, LENGTH), jnp.bool_)},
    "biased": {"bias": jax.ShapeDtypeStruct((1, HEADS, LENGTH, LENGTH), jnp.float32)},
    "dropped": {"dropout_prob": 0.1, "dropout_seed": jax.ShapeDtypeStruct((), jnp.uint32)},
    "highest": {"precision": lax.Precision.HIGHEST},
    "sparse": {"pattern": LocalMask((LENGTH, LENGTH), (512, 0))},
    "everything": {
        "q_segment_ids": IDS,
        "kv_segment_ids": IDS,
        "bias": jax.ShapeDtypeStruct((1, HEADS, LENGTH, LENGTH), jnp.bfloat16),
        "softmax_aux": jax.ShapeDtypeStruct((HEADS,), jnp.float32),
        "logits_soft_cap": 30.0,
        "dropout_prob": 0.1,
        "dropout_seed": jax.ShapeDtypeStruct((), jnp.uint32),
    },
}
KERNELS = ("flash_fwd_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel", "flash_bwd_dbias_kernel")
# What has spilled with some tile that was a default once, or nearly: the most demanding features by chip and head size.
DEMANDING = [
    ("sm_80", 64, jnp.bfloat16, "dropped"),
    ("sm_80", 256, jnp.bfloat16, "packed"),
    ("sm_90", 128, jnp.bfloat16, "packed"),
    ("sm_90", 128, jnp.bfloat16, "sparse"),
    ("sm_90", 256, jnp.bfloat16, "dropped"),
    ("sm_120", 128, jnp.bfloat16, "masked"),
    ("sm_80", 128, jnp.float32, "dropped"),
    ("sm_90", 128, jnp.float32, "biased"),
    ("sm_100", 64, jnp.float32, "biased"),
    ("sm_120", 256, jnp.float32, "packed"),
    ("sm_80", 256, jnp.float32, "biased"),
    ("sm_90", 128, jnp.float32, "masked"),
    ("sm_80", 128, jnp.float32, "highest"),
    ("gfx942", 128, jnp.float32, "causal"),
]
TANGENT_KERNELS = [
    (64, jnp.bfloat16, "sm_90", "packed", 0),
    (128, jnp.bfloat16, "sm_90", "causal", 8),
    (128, jnp.bfloat16, "sm_90", "packed", 0),
    (128, jnp.bfloat16, "sm_80", "causal", 0),
    (128, jnp.bfloat16, "sm_120", "causal", 0),
    (64, jnp.float32, "sm_90", "causal", 0),
    (128, jnp.bfloat16, "gfx942", "causal", 0),
]
"""Head size, dtype, chip, features, and the bytes that spill."""


def launches(chip, head_size, features, dtype=jnp.bfloat16):
    """What a call and its gradients launch on a chip."""
    device, array = CHIPS[chip], jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, head_size), dtype)
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=0.1, causal=True, **features)
    wanted = frozenset(x for x in ("query", "key", "value", "bias", "softmax_aux") if getattr(record, x) is not None)

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    return calls


@pytest.mark.parametrize(("head_size", "chip"), on_chips((64, 128, 256), CHIPS))
def test_default_tiles_fit_the_chip_and_spill_nothing(head_size, chip):
    calls = launches(chip, head_size, FEATURES["causal"])
    assert {call.kernel.__name__ for call in calls} == set(KERNELS) - {"flash_bwd_dbias_kernel"}
    assert_fits_and_spills_nothing(calls, chip)


@pytest.mark.parametrize(("chip", "head_size", "dtype", "features"), DEMANDING)
def test_default_tiles_spill_nothing_where_features_and_float32_take_registers(chip, head_size, dtype, features):
    assert_fits_and_spills_nothing(launches(chip, head_size, FEATURES[features], dtype), chip)


@pytest.mark.parametrize(("kernel", "chip"), on_chips(KERNELS, CHIPS))
def test_every_feature_at_once_compiles_and_fits(kernel, chip):
    calls = {call.kernel.__name__: call for call in launches(chip, 64, FEATURES["everything"])}
    assert calls.keys() == set(KERNELS)
    assert_fits([calls[kernel]], chip)


@pytest.mark.parametrize(("head_size", "dtype", "chip", "features", "spilled_bytes"), TANGENT_KERNELS)
def test_tiles_with_tangents_fit_the_chip_and_spill_little(head_size, dtype, chip, features, spilled_bytes):
    array = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, head_size), dtype)
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=0.1, causal=True, **FEATURES[features])
    tangents = {"query": array, "key": array, "value": array}
    with target_device(CHIPS[chip]), launch.collect_launches() as calls:
        jax.eval_shape(lambda record, tangents: forward_mode(record, tangents, None), record, tangents)
    assert_fits(calls, chip)
    assert [ahead.compile_for_chip(call, chip).spilled_bytes for call in calls] <= [spilled_bytes]


def test_hopper_kernels_use_wgmma():
    for call in launches("sm_90", 128, FEATURES["causal"]):
        assert "wgmma" in ahead.compile_for_chip(call, "sm_90").assembly


def test_compiling_works_after_jax_triton_disabled_the_cache(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    call = launches("sm_90", 64, FEATURES["causal"])[0]
    assert ahead.compile_for_chip(call, "sm_90").spilled_bytes == 0
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_an_unknown_chip_is_named():
    call = launches("sm_90", 64, FEATURES["causal"])[0]
    with pytest.raises(ValueError, match="chip: got 'sm_1', wants one of sm_80"):
        ahead.compile_for_chip(call, "sm_1")
