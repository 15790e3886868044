"""The kernel of the union of lists compiled for real chips by their own compiler, which needs none of them."""

import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_pallas.tpu.token_sparse_attention_union import config
from ejkernel_pallas.tpu.token_sparse_attention_union.forward import forward

pytestmark = pytest.mark.needs("libtpu")

T, S, K = 100, 4000, 1000
CASES = {
    "bfloat16": ("bfloat16", 64, 1),
    "bfloat16, 16 queries per tile, sinks": ("bfloat16", 64, 3),
    "float32": ("float32", 16, 0),
}
"""Dtype, heads, and the index among the candidates."""


@pytest.mark.parametrize(("case", "name"), on_chips(list(CASES)))
def test_forward_compiles_and_keeps_no_scores(case, name):
    dtype, heads, candidate = CASES[case]

    def attend(query, key, indices, sinks):
        record = TokenSparseAttention(
            query=query,
            key=key,
            indices=indices,
            softmax_scale=0.1,
            value_size=512,
            softmax_aux=sinks if "sinks" in case else None,
        )
        return forward(record, config.candidates(record, None, "forward")[candidate])

    arguments = (
        shaped((1, T, heads, 576), dtype),
        shaped((1, S, 1, 576), dtype),
        shaped((1, T, 1, K), "int32"),
        shaped((heads,), "float32"),
    )
    program = compiled(attend, arguments, name)
    assert "ejkernel_token_sparse_attention_union" in program.as_text()
    # Queries, keys and outputs padded and in another order, and lse in every lane: nothing per pair.
    arrays = (5 * T * heads + 2 * S) * (576 + 64) * arguments[0].dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < arrays + 4 * T * heads * 128 + 2**23
