"""DeepSeek V3.2's latent attention to the tokens that its indexer selects."""

import torch
from tests.models.originals.common import LATENT_ATTENTION, causal_mask, rotary
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Config,
    DeepseekV32RotaryEmbedding,
)

CONFIG = DeepseekV32Config(
    **LATENT_ATTENTION,
    q_lora_rank=10,
    index_topk=5,
    index_head_dim=8,
    index_n_heads=8,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return DeepseekV32Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = causal_mask(x.shape[1]).expand(x.shape[0], -1, -1, -1)
    return layer(x, rotary(DeepseekV32RotaryEmbedding(CONFIG), x), mask)[0]
