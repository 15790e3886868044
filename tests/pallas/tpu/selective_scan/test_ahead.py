"""The selective scan's kernels compiled for real chips by their own compiler, which needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import CHIPS, compiled, on_chips, shaped

from ejkernel.modules import state_space_v1
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, C, E = 200, 1536, 16


@pytest.mark.parametrize("name", CHIPS)
def test_both_passes_compile_and_copy_no_states(name):
    def both(x, decay, write, read, skip, step, states, bounds):
        def call(x, decay, write, read, skip, step, states):
            return state_space_v1(
                x, decay, write, read, skip, step, initial_state=states, cu_seqlens=bounds, platform="pallas"
            )[:2]

        output, pull = jax.vjp(call, x, decay, write, read, skip, step, states)
        return output, pull(output)

    wide, narrow = shaped((1, T, C)), shaped((1, T, E))
    numbers, states = shaped((C, E), "float32"), shaped((3, C, E), "float32")
    arguments = (wide, numbers, narrow, narrow, shaped((C,), "float32"), wide, states, shaped((4,), "int32"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(both, arguments, name)
    for kernel in ("fwd", "bwd"):
        assert f"ejkernel_selective_scan_selective_scan_{kernel}" in made.as_text()
    # The kernels read states with channels in lanes, as the compiler lays them out: nothing transposes them.
    copies = [line for line in made.as_text().splitlines() if " copy(" in line and f"f32[3,{E},{C}]" in line]
    assert not copies
    # Chunks of three sequences in either pass; nothing has a state for every token.
    assert made.memory_analysis().temp_size_in_bytes < 64 * T * C * jnp.dtype(jnp.bfloat16).itemsize


@pytest.mark.parametrize(("tokens", "name"), on_chips([1, 8]))
def test_scan_steps_update_donated_slots_without_a_copy(tokens, name):
    def step(x, decay, write, read, skip, step, slots, starts, indices):
        states = {"initial_state": slots, "cu_seqlens": starts, "state_indices": indices}
        return state_space_v1(x, decay, write, read, skip, step, **states, platform="pallas")[:2]

    sequences, slots = 8, shaped((16, C, E), "float32")
    wide, narrow = shaped((1, tokens * sequences, C)), shaped((1, tokens * sequences, E))
    fields = (wide, shaped((C, E), "float32"), narrow, narrow, shaped((C,), "float32"), wide)
    given = (*fields, slots, shaped((sequences + 1,), "int32"), shaped((sequences,), "int32"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(step, given, name, donate=6)
    memory, size = made.memory_analysis(), 4 * slots.size
    assert memory.alias_size_in_bytes >= size
    # Chunks of 64 tokens with one each would take 64 times the memory of x.
    assert memory.temp_size_in_bytes < 2 * size
    shapes = (f"f32[16,{E},{C}]", f"f32[16,{C},{E}]")
    copies = [line for line in made.as_text().splitlines() if " copy" in line and any(x in line for x in shapes)]
    assert not copies
    # The residuals of the backward pass are dropped, and with them their kernel.
    assert "ejkernel_selective_scan_selective_state_update" in made.as_text()
    assert "selective_scan_fwd" not in made.as_text()
