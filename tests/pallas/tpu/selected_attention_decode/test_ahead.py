"""The decode kernel of native sparse attention compiled for real chips by their own compiler, which needs none."""

import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import native_sparse_attention
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

B, N, S, D, K = 4, 80, 64, 128, 16
CASES = {
    "pages": ("bfloat16", 64, 4, D),
    "pages, a single head": ("bfloat16", 16, 1, D),
    "pages, float32, heads of 64": ("float32", 8, 2, 64),
    "dense": ("bfloat16", 64, 4, D),
    "dense, heads of 60": ("bfloat16", 6, 2, 60),
}
MAX_TEMPORARY_BYTES = 2**21
"""Queries and outputs; a copy of either cache would take 2.6 MB or more."""


@pytest.mark.parametrize(("case", "name"), on_chips(list(CASES)))
def test_decode_compiles_and_copies_no_cache(case, name):
    dtype, heads, kv_heads, size = CASES[case]
    is_dense = case.startswith("dense")
    cache = shaped((B, N * S, kv_heads, size) if is_dense else (B * N, S, kv_heads, size), dtype)

    def forward(query, key, value, indices, lengths, tables, gate):
        pages = {} if is_dense else {"block_tables": tables, "kv_lens": lengths}
        fields = {"block_indices": indices, "g_swa": gate, **pages}
        return native_sparse_attention(query, key, value, **fields)

    arguments = (
        shaped((B, 1, heads, size), dtype),
        cache,
        cache,
        shaped((B, 1, kv_heads, K), "int32"),
        shaped((B,), "int32"),
        shaped((B, N), "int32"),
        shaped((B, 1, heads), dtype),
    )
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        program = compiled(forward, arguments, name)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert "ejkernel_selected_attention_decode" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < MAX_TEMPORARY_BYTES
