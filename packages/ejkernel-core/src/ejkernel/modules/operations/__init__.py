"""One module an operation; the public functions are re-exported by `ejkernel.modules`.

`OPS` is the list that dispatch, the command line, the docs and the tests go by.
"""

from ejkernel.modules.operations import (
    chunked_prefill_paged_decode,
    decode_attention,
    flash_attention,
    gated_delta_rule,
    gated_linear_attention,
    grouped_matmul,
    kernel_delta_attention,
    lightning_attention,
    mean_pooling,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_gated_delta_rule,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    recurrent_attention,
    state_space_v2,
    unified_attention,
)

OPS = (
    chunked_prefill_paged_decode.OP,
    decode_attention.OP,
    flash_attention.OP,
    gated_delta_rule.OP,
    gated_linear_attention.OP,
    kernel_delta_attention.OP,
    lightning_attention.OP,
    page_attention.OP,
    prefill_page_attention.OP,
    ragged_decode_attention.OP,
    ragged_gated_delta_rule.OP,
    ragged_page_attention_v2.OP,
    ragged_page_attention_v3.OP,
    recurrent_attention.OP,
    state_space_v2.OP,
    unified_attention.OP,
    mean_pooling.OP,
    grouped_matmul.OP,
)

__all__ = [
    "OPS",
    "chunked_prefill_paged_decode",
    "decode_attention",
    "flash_attention",
    "gated_delta_rule",
    "gated_linear_attention",
    "grouped_matmul",
    "kernel_delta_attention",
    "lightning_attention",
    "mean_pooling",
    "page_attention",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "recurrent_attention",
    "state_space_v2",
    "unified_attention",
]
