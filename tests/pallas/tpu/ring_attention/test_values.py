"""Ring attention by collectives between interpreted kernels, and which way a call takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_records import interpreted
from tpu_rings import alike, answers, arrays, both, ids

from ejkernel.modules import ring_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types import MaskInfo
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel_pallas.tpu.ring_attention.kernels.collective_backward import backward
from ejkernel_pallas.tpu.ring_attention.kernels.collective_forward import forward

RANDOM = np.random.default_rng(1)
SHUFFLED = RANDOM.permutation(512)[None].astype(np.int32)
PAIRS = (1, 2, 240, 240)
MASK = MaskInfo(_attention_mask=np.ones((1, 1, 512, 512), bool))

SLOPES, BIASES = (jnp.asarray(RANDOM.normal(size=size), jnp.float32) for size in ((2,), (1, 240)))
DOCUMENTS = jnp.asarray(np.sort(RANDOM.integers(0, 3, 240)), jnp.int32)


def decay(score, b, h, q_idx, k_idx):
    return jnp.where(k_idx == q_idx, score, score - 0.01 * SLOPES[h] * jnp.abs(q_idx - k_idx)) + BIASES[b, k_idx]


def same_document(b, h, q_idx, k_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[k_idx]) & (q_idx != 130)


CASES = {
    "striped, grouped heads": (2, arrays((2, 512, 2, 1, 32, 48)), {"causal": True}),
    "eight devices, window on both sides": (8, arrays((1, 1024, 1, 1, 32, 32)), {"sliding_window": (150, 100)}),
    "segments, sinks and soft cap": (
        2,
        arrays(
            (1, 512, 2, 1, 32, 32),
            softmax_aux=np.float32([0.5, -1.0]),
            q_segment_ids=ids(150, 250, 112),
            kv_segment_ids=ids(150, 250, 112),
        ),
        {"causal": True, "logits_soft_cap": 2.0},
    ),
    "positions": (
        4,
        arrays((1, 512, 1, 1, 32, 32), q_positions=SHUFFLED, kv_positions=np.arange(512, dtype=np.int32)[None]),
        {"causal": True, "sliding_window": (200, 0)},
    ),
    "functions of indices in the whole sequence": (
        2,
        arrays((1, 240, 2, 1, 32, 32), score_mod=score_function("score_mod", decay, jnp.float32)),
        {"sliding_window": (200, 10), "mask_mod": mask_function("mask_mod", same_document)},
    ),
    "bias and mask of awkward halves": (
        2,
        arrays(
            (1, 240, 2, 1, 32, 32), bias=RANDOM.normal(size=PAIRS).astype("float32"), mask=RANDOM.random(PAIRS) < 0.7
        ),
        {"causal": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    size, given, options = CASES[name]
    wanted = answers(size, given, **options)
    with interpreted():
        got = both(forward, backward, size, given, **options)
    alike(got, wanted)


TPU = DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")


def placed(devices):
    """The arguments that spread a call over a ring."""
    mesh = jax.make_mesh((devices,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return {"mesh": mesh, "in_specs": (P(None, "sp"),) * 3, "out_specs": P(None, "sp"), "axis_name": "sp"}


def program(tokens, devices=4, **options):
    """What a call compiles to on TPUs."""
    mesh = AbstractMesh((devices,), ("sp",), (AxisType.Auto,), abstract_device=AbstractDevice("TPU v6 lite", 1, "tpu"))
    query = jax.ShapeDtypeStruct((1, tokens, 2, 128), "bfloat16", sharding=NamedSharding(mesh, P(None, "sp")))

    def call(query):
        spread = {**placed(devices), "mesh": mesh}
        return ring_attention(query, query, query, platform="pallas", **spread, **options)

    with target_device(TPU):
        return export.export(jax.jit(call), platforms=["tpu"])(query).mlir_module()


@pytest.mark.parametrize(
    ("call", "remote"),
    [
        ({"tokens": 1024, "causal": True}, True),
        ({"tokens": 512}, True),
        ({"tokens": 512, "causal": True}, False),
        ({"tokens": 1000}, False),
        ({"tokens": 512, "devices": 1}, False),
        ({"tokens": 512, "mask_info": MASK}, False),
        ({"tokens": 1024, "mask_mod": lambda b, h, q_idx, k_idx: k_idx <= q_idx}, True),
        ({"tokens": 1024, "causal": True, "score_mod": decay}, False),
    ],
)
def test_remote_copies_are_used_where_shards_are_whole_tiles(call, remote):
    assert ("ejkernel_ring_forward_remote" in program(**call)) is remote


def test_ring_programs_are_exported_without_a_tpu():
    """Both passes, under `jax.checkpoint` in a loop, for chips that a mesh describes."""
    chip = AbstractDevice("TPU v6 lite", 1, "tpu")
    mesh = AbstractMesh((8,), ("sp",), (AxisType.Auto,), abstract_device=chip)
    query = jax.ShapeDtypeStruct((1, 2048, 2, 128), "bfloat16", sharding=NamedSharding(mesh, P(None, "sp")))

    def loss(query, key, value):
        output = ring_attention(query, key, value, causal=True, platform="pallas", **{**placed(8), "mesh": mesh})
        return jnp.sum(output.astype(jnp.float32))

    def looped(*arrays):
        return jax.lax.scan(lambda total, _: (total + jax.checkpoint(loss)(*arrays), None), 0.0, length=2)[0]

    with target_device(TPU):
        exported = export.export(jax.jit(jax.grad(looped, (0, 1, 2))), platforms=["tpu"])(query, query, query)
    assert exported.nr_devices == 8
    again = export.deserialize(exported.serialize())
    for name in ("ejkernel_ring_forward_remote", "ejkernel_ring_backward_remote"):
        assert name in again.mlir_module()
