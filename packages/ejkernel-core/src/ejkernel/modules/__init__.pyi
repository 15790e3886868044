"""The public names of `ejkernel.modules` and where each is defined: their one list.

Type checkers read it, and `ejkernel.modules.exports` does. One line is one module, and the modules below
`ejkernel.modules.operations`, except for `configs`, are the operations.
"""

from ejkernel.modules.operations.all_gather_matmul import (
    AllGatherMatmul as AllGatherMatmul,
    all_gather_matmul as all_gather_matmul,
)
from ejkernel.modules.operations.attention import Attention as Attention, attention as attention
from ejkernel.modules.operations.blocksparse_attention import (
    BlockSparseAttention as BlockSparseAttention,
    blocksparse_attention as blocksparse_attention,
)
from ejkernel.modules.operations.causal_conv1d import CausalConv1d as CausalConv1d, causal_conv1d as causal_conv1d
from ejkernel.modules.operations.chunked_prefill_paged_decode import (
    ChunkedPrefillPagedDecode as ChunkedPrefillPagedDecode,
    chunked_prefill_paged_decode as chunked_prefill_paged_decode,
)
from ejkernel.modules.operations.configs import *
from ejkernel.modules.operations.decode_attention import (
    DecodeAttention as DecodeAttention,
    decode_attention as decode_attention,
)
from ejkernel.modules.operations.deepseek_attn import (
    DeepSeekAttention as DeepSeekAttention,
    deepseek_attn as deepseek_attn,
)
from ejkernel.modules.operations.expert_routing import ExpertRouting as ExpertRouting, expert_routing as expert_routing
from ejkernel.modules.operations.flash_attention import (
    FlashAttention as FlashAttention,
    flash_attention as flash_attention,
)
from ejkernel.modules.operations.flash_mla import (
    FlashMLA as FlashMLA,
    flash_mla as flash_mla,
    mla_attention as mla_attention,
)
from ejkernel.modules.operations.gated_delta_rule import (
    GatedDeltaRule as GatedDeltaRule,
    gated_delta_rule as gated_delta_rule,
    gdr_attention as gdr_attention,
)
from ejkernel.modules.operations.gated_grouped_matmul import (
    GatedGroupedMatmul as GatedGroupedMatmul,
    gated_grouped_matmul as gated_grouped_matmul,
)
from ejkernel.modules.operations.gated_linear_attention import (
    GLAttention as GLAttention,
    gated_linear_attention as gated_linear_attention,
    gla_attention as gla_attention,
    recurrent_gla as recurrent_gla,
)
from ejkernel.modules.operations.fused_cross_entropy import (
    CrossEntropyOutput as CrossEntropyOutput,
    FusedCrossEntropy as FusedCrossEntropy,
    fused_cross_entropy as fused_cross_entropy,
)
from ejkernel.modules.operations.fused_kl_divergence import (
    FusedKLDivergence as FusedKLDivergence,
    KLDivergenceOutput as KLDivergenceOutput,
    fused_kl_divergence as fused_kl_divergence,
)
from ejkernel.modules.operations.gather_reduce import GatherReduce as GatherReduce, gather_reduce as gather_reduce
from ejkernel.modules.operations.grouped_matmul import GroupedMatmul as GroupedMatmul, grouped_matmul as grouped_matmul
from ejkernel.modules.operations.gru import GRU as GRU, gru as gru
from ejkernel.modules.operations.kernel_delta_attention import (
    KernelDeltaAttention as KernelDeltaAttention,
    kda_attention as kda_attention,
    kda_decay as kda_decay,
    kernel_delta_attention as kernel_delta_attention,
)
from ejkernel.modules.operations.lightning_attention import (
    LightningAttention as LightningAttention,
    lightning_attention as lightning_attention,
    lightning_attn as lightning_attn,
)
from ejkernel.modules.operations.lightning_indexer import (
    LightningIndexer as LightningIndexer,
    lightning_indexer as lightning_indexer,
)
from ejkernel.modules.operations.lightning_indexer_dense_loss import (
    LightningIndexerDenseLoss as LightningIndexerDenseLoss,
    lightning_indexer_dense_loss as lightning_indexer_dense_loss,
)
from ejkernel.modules.operations.lightning_indexer_loss import (
    LightningIndexerLoss as LightningIndexerLoss,
    lightning_indexer_loss as lightning_indexer_loss,
)
from ejkernel.modules.operations.lstm import LSTM as LSTM, lstm as lstm
from ejkernel.modules.operations.mean_pooling import MeanPooling as MeanPooling, mean_pooling as mean_pooling
from ejkernel.modules.operations.mla_decode import (
    MLADecode as MLADecode,
    flash_mla_decode as flash_mla_decode,
    mla_decode as mla_decode,
)
from ejkernel.modules.operations.multi_latent_ragged_page_attention import (
    MultiLatentRaggedPageAttention as MultiLatentRaggedPageAttention,
    multi_latent_ragged_page_attention as multi_latent_ragged_page_attention,
)
from ejkernel.modules.operations.multi_latent_ragged_page_attention_v2 import (
    MultiLatentRaggedPageAttentionV2 as MultiLatentRaggedPageAttentionV2,
    multi_latent_ragged_page_attention_v2 as multi_latent_ragged_page_attention_v2,
)
from ejkernel.modules.operations.native_sparse_attention import (
    NativeSparseAttention as NativeSparseAttention,
    native_sparse_attention as native_sparse_attention,
)
from ejkernel.modules.operations.page_attention import PageAttention as PageAttention, page_attention as page_attention
from ejkernel.modules.operations.prefill_page_attention import (
    PrefillPageAttention as PrefillPageAttention,
    prefill_page_attention as prefill_page_attention,
)
from ejkernel.modules.operations.quantized_matmul import (
    QuantizedMatmul as QuantizedMatmul,
    quantized_matmul as quantized_matmul,
)
from ejkernel.modules.operations.ragged_decode_attention import (
    RaggedDecodeAttention as RaggedDecodeAttention,
    ragged_decode_attention as ragged_decode_attention,
)
from ejkernel.modules.operations.ragged_gated_delta_rule import (
    RaggedGatedDeltaRule as RaggedGatedDeltaRule,
    ragged_gated_delta_rule as ragged_gated_delta_rule,
)
from ejkernel.modules.operations.ragged_page_attention_v2 import (
    RaggedPageAttention as RaggedPageAttention,
    RaggedPageAttentionv2 as RaggedPageAttentionv2,
    ragged_page_attention as ragged_page_attention,
    ragged_page_attention_v2 as ragged_page_attention_v2,
)
from ejkernel.modules.operations.ragged_page_attention_v2_turboquant import (
    RaggedPageAttentionv2TurboQuant as RaggedPageAttentionv2TurboQuant,
    ragged_page_attention_v2_turboquant as ragged_page_attention_v2_turboquant,
)
from ejkernel.modules.operations.ragged_page_attention_v3_turboquant import (
    RaggedPageAttentionv3TurboQuant as RaggedPageAttentionv3TurboQuant,
    ragged_page_attention_v3_turboquant as ragged_page_attention_v3_turboquant,
)
from ejkernel.modules.operations.ragged_page_attention_v3 import (
    RaggedPageAttentionv3 as RaggedPageAttentionv3,
    ragged_page_attention_v3 as ragged_page_attention_v3,
)
from ejkernel.modules.operations.recurrent_attention import (
    RecurrentAttention as RecurrentAttention,
    recurrent as recurrent,
    recurrent_attention as recurrent_attention,
)
from ejkernel.modules.operations.reduce_scatter_matmul import (
    ReduceScatterMatmul as ReduceScatterMatmul,
    reduce_scatter_matmul as reduce_scatter_matmul,
)
from ejkernel.modules.operations.ring_attention import RingAttention as RingAttention, ring_attention as ring_attention
from ejkernel.modules.operations.rnn import RNN as RNN, rnn as rnn
from ejkernel.modules.operations.rwkv4 import RWKV4 as RWKV4, rwkv4 as rwkv4
from ejkernel.modules.operations.rwkv6 import RWKV6 as RWKV6, rwkv6 as rwkv6
from ejkernel.modules.operations.rwkv7 import RWKV7 as RWKV7, rwkv7 as rwkv7
from ejkernel.modules.operations.rwkv7_mul import RWKV7Mul as RWKV7Mul, rwkv7_mul as rwkv7_mul
from ejkernel.modules.operations.scaled_dot_product_attention import (
    ScaledDotProductAttention as ScaledDotProductAttention,
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from ejkernel.modules.operations.state_space_v1 import StateSpaceV1 as StateSpaceV1, state_space_v1 as state_space_v1
from ejkernel.modules.operations.state_space_v2 import StateSpaceV2 as StateSpaceV2, state_space_v2 as state_space_v2
from ejkernel.modules.operations.token_sparse_attention import (
    TokenSparseAttention as TokenSparseAttention,
    token_sparse_attention as token_sparse_attention,
)
from ejkernel.modules.operations.unified_attention import (
    UnifiedAttention as UnifiedAttention,
    unified_attention as unified_attention,
)
from ejkernel.ops.execution.executor import create_default_executor as create_default_executor
