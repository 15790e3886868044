"""DeepSeek V2's latent attention."""

import torch
from tests.models.originals.common import LATENT_ATTENTION, causal_mask, rotary
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2Config,
    DeepseekV2RotaryEmbedding,
)

CONFIG = DeepseekV2Config(
    **LATENT_ATTENTION,
    q_lora_rank=None,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return DeepseekV2Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x, attention_mask=causal_mask(x.shape[1]), position_embeddings=rotary(DeepseekV2RotaryEmbedding(CONFIG), x)
    )[0]
