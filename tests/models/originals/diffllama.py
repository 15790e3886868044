"""DiffLlama's attention."""

import torch
from tests.models.originals.common import causal_mask, rotary
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaConfig,
    DiffLlamaRotaryEmbedding,
)

CONFIG = DiffLlamaConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)


def build() -> torch.nn.Module:
    return DiffLlamaAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(DiffLlamaRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1]))[0]
