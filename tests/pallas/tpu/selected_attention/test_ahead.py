"""The kernels of the selected branch compiled for real chips by their own compiler, which needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import native_sparse_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T = 600


@pytest.mark.parametrize(
    ("case", "name"), on_chips([("bfloat16", 16, 64), ("float32", 8, 32), ("bfloat16", 4, 100), ("bfloat16", 2, 200)])
)
def test_both_passes_compile(case, name):
    dtype, group, block_size = case

    def both(query, key, value, indices):
        def call(*arrays):
            return native_sparse_attention(
                *arrays, block_indices=indices, block_counts=4, block_size=block_size, platform="pallas"
            )

        output, pull = jax.vjp(call, query, key, value)
        return output, pull(output)

    query, key = (shaped((1, T, heads, 128), dtype) for heads in (group, 1))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(both, (query, key, key, shaped((1, T, 1, 4), jnp.int32)), name)
    for kernel in ("fwd", "bwd_dq", "bwd_dkdv"):
        assert f"ejkernel_selected_attention_{kernel}" in made.as_text()
