"""One module an operation; `ejkernel.modules` re-exports the public functions, and every name of it is here too.

The module of an operation can be called as its function, so that `ejkernel.modules.operations.flash_attention` is both.

`EXPORTS` is the one table of operations: the module of each, which holds its `OP`, with the public names it defines.
`OPS`, the list that dispatch, the command line, the docs and the tests go by, is made from it when it is first asked
for, so that importing one operation does not import the others.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.modules import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
    from ejkernel.ops.model import Op

    OPS: tuple[Op, ...]

EXPORTS: dict[str, tuple[str, ...]] = {
    "attention": ("Attention", "attention"),
    "blocksparse_attention": ("BlockSparseAttention", "blocksparse_attention"),
    "causal_conv1d": ("CausalConv1d", "causal_conv1d"),
    "chunked_prefill_paged_decode": ("ChunkedPrefillPagedDecode", "chunked_prefill_paged_decode"),
    "decode_attention": ("DecodeAttention", "decode_attention"),
    "expert_routing": ("ExpertRouting", "expert_routing"),
    "flash_attention": ("FlashAttention", "flash_attention"),
    "flash_mla": ("FlashMLA", "flash_mla", "mla_attention"),
    "gated_delta_rule": ("GatedDeltaRule", "gated_delta_rule", "gdr_attention"),
    "gated_grouped_matmul": ("GatedGroupedMatmul", "gated_grouped_matmul"),
    "gated_linear_attention": ("GLAttention", "gated_linear_attention", "gla_attention", "recurrent_gla"),
    "gather_reduce": ("GatherReduce", "gather_reduce"),
    "grouped_matmul": ("GroupedMatmul", "grouped_matmul"),
    "gru": ("GRU", "gru"),
    "kernel_delta_attention": ("KernelDeltaAttention", "kda_attention", "kda_decay", "kernel_delta_attention"),
    "lightning_attention": ("LightningAttention", "lightning_attention", "lightning_attn"),
    "lstm": ("LSTM", "lstm"),
    "mean_pooling": ("MeanPooling", "mean_pooling"),
    "mla_decode": ("MLADecode", "flash_mla_decode", "mla_decode"),
    "multi_latent_ragged_page_attention": ("MultiLatentRaggedPageAttention", "multi_latent_ragged_page_attention"),
    "multi_latent_ragged_page_attention_v2": (
        "MultiLatentRaggedPageAttentionV2",
        "multi_latent_ragged_page_attention_v2",
    ),
    "native_sparse_attention": ("NativeSparseAttention", "native_sparse_attention"),
    "page_attention": ("PageAttention", "page_attention"),
    "prefill_page_attention": ("PrefillPageAttention", "prefill_page_attention"),
    "quantized_matmul": ("QuantizedMatmul", "quantized_matmul"),
    "ragged_decode_attention": ("RaggedDecodeAttention", "ragged_decode_attention"),
    "ragged_gated_delta_rule": ("RaggedGatedDeltaRule", "ragged_gated_delta_rule"),
    "ragged_page_attention_v2": (
        "RaggedPageAttention",
        "RaggedPageAttentionv2",
        "ragged_page_attention",
        "ragged_page_attention_v2",
    ),
    "ragged_page_attention_v3": ("RaggedPageAttentionv3", "ragged_page_attention_v3"),
    "recurrent_attention": ("RecurrentAttention", "recurrent", "recurrent_attention"),
    "ring_attention": ("RingAttention", "ring_attention"),
    "rnn": ("RNN", "rnn"),
    "scaled_dot_product_attention": ("ScaledDotProductAttention", "scaled_dot_product_attention"),
    "state_space_v1": ("StateSpaceV1", "state_space_v1"),
    "state_space_v2": ("StateSpaceV2", "state_space_v2"),
    "unified_attention": ("UnifiedAttention", "unified_attention"),
}

__all__ = ["EXPORTS", "OPS"]


def __getattr__(name: str) -> Any:
    if name == "OPS":
        globals()["OPS"] = tuple(_module(operation).OP for operation in EXPORTS)
        return globals()["OPS"]
    if name in EXPORTS:
        return _module(name)
    if name in _modules().__all__:
        globals()[name] = getattr(_modules(), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *EXPORTS, *_modules().__all__})


def _modules() -> Any:
    """The package around this one, which has all public names."""
    return sys.modules[__name__.rpartition(".")[0]]


def _module(operation: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{operation}")
