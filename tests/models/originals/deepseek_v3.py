"""DeepSeek V3's latent attention."""

import torch
from tests.models.originals.common import LATENT_ATTENTION, causal_mask, rotary
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3Config,
    DeepseekV3RotaryEmbedding,
)

CONFIG = DeepseekV3Config(
    **LATENT_ATTENTION,
    q_lora_rank=10,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return DeepseekV3Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(DeepseekV3RotaryEmbedding(CONFIG), x), causal_mask(x.shape[1]))[0]
