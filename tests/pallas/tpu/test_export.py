"""Calls that a machine without a TPU exports for one."""

import jax
import jax.numpy as jnp
import pytest
import tpu_paged_records

from ejkernel.modules import flash_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.paged_attention import config
from ejkernel_pallas.tpu.paged_attention.forward import forward

CHIP = DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")


@pytest.mark.parametrize("length", [256, 300])
def test_exported_attention_is_loaded_and_lowered_again(length):
    def gradients(query, key, value, sinks):
        def total(*arrays):
            output = flash_attention(*arrays[:3], None, None, None, arrays[3], causal=True, platform="pallas")
            return output.astype(jnp.float32).sum()

        return jax.value_and_grad(total, (0, 1, 2, 3))(query, key, value, sinks)

    query = jax.ShapeDtypeStruct((1, length, 4, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    arguments = (query, key, key, jax.ShapeDtypeStruct((4, 1), jnp.float32))
    with target_device(CHIP):
        made = jax.export.export(jax.jit(gradients), platforms=["tpu"])(*arguments)
    loaded = jax.export.deserialize(made.serialize())
    assert loaded.platforms == ("tpu",)
    assert [x.shape for x in loaded.out_avals] == [(), *(x.shape for x in arguments)]
    again = jax.jit(loaded.call).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert again.count("@tpu_custom_call") == 3  # forward, keys and queries


@pytest.mark.parametrize(
    ("version", "name"), [("v2", "sinks, lse, bfloat16"), ("v3", "head size 64 in lanes, bfloat16")]
)
def test_exported_paged_attention_is_loaded_and_lowered_again(version, name):
    leaves, structure = jax.tree.flatten(tpu_paged_records.case(f"ragged_page_attention_{version}", name))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def attend(*leaves):
        record = jax.tree.unflatten(structure, leaves)
        return forward(record, config.heuristic(record, CHIP, "forward"))[0]

    with target_device(CHIP):
        made = jax.export.export(jax.jit(attend), platforms=["tpu"])(*shapes)
    loaded = jax.export.deserialize(made.serialize())
    again = jax.jit(loaded.call).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert again.count("@tpu_custom_call") == 1
