"""The causal convolution's kernels compiled for real chips by their own compiler, which needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import causal_conv1d
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, C = 600, 640


@pytest.mark.parametrize(("dtype", "name"), on_chips(["bfloat16", "float32"]))
def test_both_passes_of_packed_sequences_compile(dtype, name):
    def both(x, weight, bias, state, bounds):
        def call(*arrays):
            output = causal_conv1d(*arrays, bounds, activation="silu", return_state=True, platform="pallas")
            return jax.tree.leaves(output)

        output, pull = jax.vjp(call, x, weight, bias, state)
        return output, pull(output)

    arguments = (
        shaped((1, T, C), dtype),
        shaped((C, 4), "float32"),
        shaped((C,), "float32"),
        shaped((3, C, 3), dtype),
        shaped((4,), "int32"),
    )
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(both, arguments, name)
    for kernel in ("fwd", "bwd"):
        assert f"ejkernel_causal_convolution_causal_conv_{kernel}" in made.as_text()
    # What is kept between the passes is no more than a few arrays of the size of x.
    assert made.memory_analysis().temp_size_in_bytes < 4 * T * C * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("kind", "name"), on_chips([(1, "bfloat16"), (8, "float32")]))
def test_steps_update_donated_slots_without_a_copy(kind, name):
    def step(x, weight, bias, slots, starts, indices):
        options = {"state_indices": indices, "activation": "silu", "return_state": True, "platform": "pallas"}
        return causal_conv1d(x, weight, bias, slots, starts, **options)

    (tokens, dtype), sequences, num_slots = kind, 16, 64
    slots = shaped((num_slots, C, 3), dtype)
    arguments = (
        shaped((1, tokens * sequences, C), dtype),
        shaped((C, 4), "float32"),
        shaped((C,), "float32"),
        slots,
        shaped((sequences + 1,), "int32"),
        shaped((sequences,), "int32"),
    )
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(step, arguments, name, donate=3)
    memory, text = made.memory_analysis(), made.as_text()
    assert memory.alias_size_in_bytes >= slots.size * slots.dtype.itemsize
    shapes = (f"[{num_slots},{C},3]", f"[3,{num_slots},{C}]")
    assert not [line for line in text.splitlines() if " copy" in line and any(x in line for x in shapes)]
    assert "ejkernel_causal_convolution_causal_conv_update" in text
    assert "causal_conv_fwd" not in text
    # Next to the kernel there are tables and weights alone.
    assert memory.temp_size_in_bytes < slots.size * slots.dtype.itemsize
