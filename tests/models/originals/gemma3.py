"""Gemma 3's attention with a window."""

import torch
from tests.models.originals.common import causal_mask
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3RotaryEmbedding,
    Gemma3TextConfig,
)

CONFIG = Gemma3TextConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attn_implementation="eager",
    sliding_window=5,
    query_pre_attn_scalar=24,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
)


def build() -> torch.nn.Module:
    return Gemma3Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x,
        Gemma3RotaryEmbedding(CONFIG)(x, torch.arange(x.shape[1])[None], "sliding_attention"),
        causal_mask(x.shape[1], CONFIG.sliding_window),
    )[0]
