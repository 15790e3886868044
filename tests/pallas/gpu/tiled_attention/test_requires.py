"""What the Mosaic GPU kernels refuse, and that they say what."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.tiled_attention import FAMILY, TiledAttention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.dispatch import refusals
from ejkernel_pallas.gpu.tiled_attention import implementations

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
IMPLEMENTATION, _ = implementations()
GRADIENTS = frozenset({"query", "key", "value"})


def reasons(record, device=H200, direction="forward", grad_fields=GRADIENTS):
    with target_device(device):
        return list(refusals(FAMILY, IMPLEMENTATION, record, device, "auto", direction, grad_fields))


def make(size=128, value_size=None, dtype=jnp.bfloat16, length=256, **fields):
    q = jax.ShapeDtypeStruct((1, length, 2, size), dtype)
    v = jax.ShapeDtypeStruct((1, length, 2, value_size or size), dtype)
    return TiledAttention(**({"query": q, "key": q, "value": v, "softmax_scale": 0.1} | fields))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_supported_fields_are_not_refused(direction):
    ids, sinks = jax.ShapeDtypeStruct((1, 256), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.float32)
    record = make(
        causal=True,
        sliding_window=(128, None),
        logits_soft_cap=30.0,
        softmax_aux=sinks,
        q_segment_ids=ids,
        kv_segment_ids=ids,
        dropout_prob=0.1,
        dropout_seed=jax.ShapeDtypeStruct((), jnp.uint32),
    )
    assert reasons(record, direction=direction, grad_fields=GRADIENTS | {"softmax_aux"}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.bfloat16)),
        ("mask", jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.bool_)),
        ("normalize_output", False),
        ("logits_dtype", jnp.dtype("bfloat16")),
    ],
)
def test_unsupported_fields_are_refused_by_name(name, value):
    assert any(name in reason for reason in reasons(make(**{name: value})))


@pytest.mark.parametrize("name", ["q_positions", "kv_positions"])
def test_positions_are_served_in_the_forward_pass_alone(name):
    positions = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    record = make(causal=True, **{name: positions})
    assert reasons(record) == []
    assert any(name in reason for reason in reasons(record, direction="backward"))
    packed = make(causal=True, q_segment_ids=positions, kv_segment_ids=positions, **{name: positions})
    assert any("q_positions" in reason for reason in reasons(packed))


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (make(dtype=jnp.float32), "float32"),
        (make(size=96), "head size 96"),
        (make(value_size=64), "value has head dimension 64"),
        (make(size=192), "values of 128"),
        (make(length=0), "empty"),
        (make(softmax_scale=-1.0), "softmax_scale is -1.0"),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, word):
    assert any(word in reason for reason in reasons(record))


@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_head_sizes_are_served_in_both_directions(size, value_size, direction):
    assert reasons(make(size=size, value_size=value_size), direction=direction) == []


@pytest.mark.parametrize(
    ("device", "word"),
    [
        (DeviceInfo(platform="cpu"), "needs nvidia"),
        (DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"), "needs nvidia"),
        (DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0), "9.0"),
        (DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0), "10.0"),
    ],
)
def test_other_devices_are_refused(device, word):
    found = reasons(make(), device)
    assert found
    assert any(word in reason for reason in found)
