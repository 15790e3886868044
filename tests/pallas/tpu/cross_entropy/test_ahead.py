"""The cross-entropy's kernels compiled for real chips by their own compiler, which needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import fused_cross_entropy
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, D, V = 1040, 4096, 2600


@pytest.mark.parametrize(("dtype", "name"), on_chips(["bfloat16", "float32"]))
def test_both_passes_compile_and_keep_no_logits(dtype, name):
    def both(hidden, head, targets):
        def loss(hidden, head):
            return fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets, platform="pallas").loss

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    arguments = (shaped((T, D), dtype), shaped((D, V), dtype), shaped((T,), "int32"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        made = compiled(both, arguments, name)
    for kernel in ("linear_statistics", "input_gradient", "head_gradient"):
        assert f"ejkernel_cross_entropy_{kernel}" in made.as_text()
    # Hidden states and gradients in whole blocks, and numbers of tokens.
    itemsize = jnp.dtype(dtype).itemsize
    assert made.memory_analysis().temp_size_in_bytes < (3 * 2048 * D + D * V) * itemsize + 2**22
