"""DeepSeek V2's latent attention."""

import torch
from tests.models.originals.common import causal_mask, rotary
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2Config,
    DeepseekV2RotaryEmbedding,
)

CONFIG = DeepseekV2Config(
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    attn_implementation="eager",
)
WIDTH = 16


def build() -> torch.nn.Module:
    return DeepseekV2Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x, attention_mask=causal_mask(x.shape[1]), position_embeddings=rotary(DeepseekV2RotaryEmbedding(CONFIG), x)
    )[0]
