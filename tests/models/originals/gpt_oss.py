"""GPT-OSS's attention with a window."""

import torch
from tests.models.originals.common import causal_mask, rotary
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssAttention,
    GptOssConfig,
    GptOssRotaryEmbedding,
)

CONFIG = GptOssConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attn_implementation="eager",
    sliding_window=5,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def build() -> torch.nn.Module:
    layer = GptOssAttention(CONFIG, layer_idx=0)
    torch.nn.init.zeros_(layer.sinks)
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(GptOssRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1], CONFIG.sliding_window))[0]
