"""The selective scan's kernels compiled for real chips by their own compiler, which needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import CHIPS, compiled, shaped

from ejkernel.modules import state_space_v1
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, C, E = 200, 1536, 16


@pytest.mark.parametrize("name", CHIPS)
def test_both_passes_and_the_states_stay_where_they_are(name):
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
