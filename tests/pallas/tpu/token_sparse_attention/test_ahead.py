"""The kernel of token-sparse attention compiled for real chips by their own compiler, which needs none of them."""

import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import token_sparse_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

T, S, K = 512, 4000, 1000


@pytest.mark.parametrize(
    ("case", "name"), on_chips([("bfloat16", False), ("float32", False), ("bfloat16", True), ("float32", True)])
)
def test_forward_compiles_and_keeps_no_scores(case, name):
    dtype, latent = case

    def forward(query, key, value, indices):
        options = {"value_size": 512, "softmax_scale": 0.1} if latent else {}
        return token_sparse_attention(query, key, None if latent else value, indices, platform="pallas", **options)

    heads, kv_heads, size = (64, 1, 576) if latent else (32, 4, 128)
    key = shaped((1, S, kv_heads, size), dtype)
    arguments = (shaped((1, T, heads, size), dtype), key, key, shaped((1, T, K), "int32"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        program = compiled(forward, arguments, name)
    assert "ejkernel_token_sparse_attention" in program.as_text()
    # Queries, keys, values and outputs padded and in another order, and lse in every lane: nothing per pair.
    arrays = (5 * T * heads + 2 * S * kv_heads) * (size + 64) * arguments[0].dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < arrays + 4 * T * heads * 128 + 2**23


@pytest.mark.parametrize(("width", "copies"), [(640, False), (576, True)])
def test_decode_of_latent_pages_copies_the_cache_unless_rows_fill_lanes(width, copies):
    def forward(query, cache, indices, tables):
        options = {"block_tables": tables, "value_size": 512, "softmax_scale": 0.1}
        return token_sparse_attention(query, cache, None, indices, **options)

    shapes = (
        ((4, 1, 16, width), "bfloat16"),
        ((8192, 64, 1, width), "bfloat16"),
        ((4, 1, 128), "int32"),
        ((4, 64), "int32"),
    )
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED["v6e"].kind)):
        program = compiled(forward, [shaped(*x) for x in shapes], "v6e")
    assert (program.memory_analysis().temp_size_in_bytes > 2 * 8192 * 64 * 512) == copies
