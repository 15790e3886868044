"""The indexer's kernel compiled for real chips by their own compiler, which needs none of them."""

import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import lightning_indexer
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, S, H, D, K = 1024, 5000, 16, 128, 512


@pytest.mark.parametrize(("dtype", "name"), on_chips(["bfloat16", "float32"]))
def test_forward_compiles_and_keeps_no_scores(dtype, name):
    def forward(query, key, weights):
        return lightning_indexer(query, key, weights, top_k=K, causal=False, platform="pallas")

    arguments = (shaped((1, T, H, D), dtype), shaped((1, S, D), dtype), shaped((1, T, H), "float32"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        program = compiled(forward, arguments, name)
    assert "ejkernel_lightning_indexer" in program.as_text()
    # The queries head by head; scores would take 20 MB.
    assert program.memory_analysis().temp_size_in_bytes < 4 * T * H * D + 2**20
