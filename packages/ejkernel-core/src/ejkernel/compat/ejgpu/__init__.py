"""The functions of the older package `ejgpu`, with the same names and arguments, as calls of this library's
operations.

They run on every device, have gradients, and take traced lengths and seeds. Dropout takes its seed as an argument.
New code should use `ejkernel.modules`.
"""

from ejkernel.compat.ejgpu.attention import flash_attention, flash_attn_varlen
from ejkernel.compat.ejgpu.blocks import generate_block_indices
from ejkernel.compat.ejgpu.linear import lightning_attn, mean_pooling, recurrent, recurrent_gla
from ejkernel.compat.ejgpu.sparse import apply_native_spare_attention, native_spare_attention
from ejkernel.compat.sample_inputs import AttentionMetadata, input_helper, varlen_input_helper
from ejkernel.compat.utils import numeric_gen

__all__ = [
    "AttentionMetadata",
    "apply_native_spare_attention",
    "flash_attention",
    "flash_attn_varlen",
    "generate_block_indices",
    "input_helper",
    "lightning_attn",
    "mean_pooling",
    "native_spare_attention",
    "numeric_gen",
    "recurrent",
    "recurrent_gla",
    "varlen_input_helper",
]
