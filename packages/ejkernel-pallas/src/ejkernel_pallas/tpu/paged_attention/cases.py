"""Conformance cases of this kernel: a soft cap without biases, and TurboQuant caches with pages of whole lanes."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import paged_turboquant
from ejkernel.modules.operations.cases.paged import MIXED_BATCH_SIZES
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes, chunked_prefill_inputs, packed_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.chunked_prefill_paged_decode import ChunkedPrefillPagedDecodeArguments
from ejkernel.modules.operations.ragged_page_attention_v2_turboquant import RaggedPageAttentionv2TurboQuantArguments
from ejkernel.modules.operations.ragged_page_attention_v3_turboquant import RaggedPageAttentionv3TurboQuantArguments
from ejkernel.modules.operations.unified_attention import UnifiedAttentionArguments
from ejkernel.ops.model import Case

CODE_SIZES = paged_turboquant.TurboQuantSizes(
    kv_lens=(150, 1, 0, 64, 20),
    q_lens=(7, 1, 0, 1, 20),
    query_rows=33,
    s=128,
    key_bits=4,
    value_bits=2,
    projections=32,
)
THREE_BIT_SIZES = paged_turboquant.TurboQuantSizes(
    kv_lens=(150, 1, 64, 20), q_lens=(1,) * 4, s=128, d=128, v=128, dtype=jnp.bfloat16, value_bits=3, projections=0
)
"""Keys and values of twelve words each, which make two registers of words of 24 bits."""


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    rows: tuple[Row[PagedSizes], ...] = (
        ("soft cap", MIXED_BATCH_SIZES, lambda key: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
    )
    sinks = jnp.array([0.5, -0.25, 0.125, 1.0], jnp.float32)

    def terms(key: jax.Array) -> dict[str, object]:
        return {"softmax_aux": sinks, "sliding_window": 70, "logits_soft_cap": 1.5, "return_lse": True}

    fields, tokens = paged_turboquant.FORMAT_FIELDS, paged_turboquant.NEW_TOKEN_FIELDS
    names = (*fields, "softmax_aux", "sliding_window", "logits_soft_cap")
    unsigned = tuple(name for name in fields if name not in paged_turboquant.SIGN_FIELDS)
    read = (
        ("codes in pages of 128 slots, window, soft cap, sinks, lse", CODE_SIZES, terms, names, ()),
        ("decode, codes of 3 bits in pages of 128 slots", THREE_BIT_SIZES, lambda key: {}, unsigned, ()),
    )
    written = (("writes codes into pages of 128 slots", CODE_SIZES, lambda key: {}, (*fields, *tokens), ()),)
    return {
        "ragged_page_attention_v2_turboquant": make_cases_of_rows(
            RaggedPageAttentionv2TurboQuantArguments, paged_turboquant.v2_inputs, read
        ),
        "ragged_page_attention_v3_turboquant": make_cases_of_rows(
            RaggedPageAttentionv3TurboQuantArguments, paged_turboquant.v3_inputs, written
        ),
        "unified_attention": make_cases_of_rows(UnifiedAttentionArguments, packed_inputs, rows),
        "chunked_prefill_paged_decode": make_cases_of_rows(
            ChunkedPrefillPagedDecodeArguments, chunked_prefill_inputs, rows
        ),
    }
