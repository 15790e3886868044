"""The kernel of the indexer's decode step compiled for real chips by their own compiler, which needs none of them."""

import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.modules import lightning_indexer
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

pytestmark = pytest.mark.needs("libtpu")

B, N, S, H, D, K = 4, 80, 64, 16, 128, 512
KEYS = {"float8_e4m3fn": 1, "int8": 1, "bfloat16": 2, "float32, dense": 1}
"""Dtypes of keys, in pages unless they are dense, and their queries per request."""


@pytest.mark.parametrize(("keys", "name"), on_chips(list(KEYS)))
def test_decode_compiles_and_copies_no_cache(keys, name):
    dtype, _, dense = keys.partition(", ")
    names = ["query", "key", "weights", *(() if dense else ("block_tables", "kv_lens"))]
    arguments = [
        shaped((B, KEYS[keys], H, D), "float32" if dense else "bfloat16"),
        shaped((B, N * S, D) if dense else (B * N, S, D), dtype),
        shaped((B, KEYS[keys], H), "float32"),
        *(() if dense else (shaped((B, N), "int32"), shaped((B,), "int32"))),
    ]
    if dtype in ("float8_e4m3fn", "int8"):
        names.append("key_scales")
        arguments.append(shaped((B * N, S), "float32"))

    def forward(*arrays):
        return lightning_indexer(**dict(zip(names, arrays, strict=True)), top_k=K)

    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        program = compiled(forward, tuple(arguments), name)
    assert "ejkernel_lightning_indexer_decode" in program.as_text()
    # The scales of the listed pages, and the queries; a copy of the cache would take 2.6 MB or more.
    assert program.memory_analysis().temp_size_in_bytes < 2**20
