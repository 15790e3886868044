"""Gemma 2's attention with a window."""

import torch
from tests.models.originals.common import causal_mask, rotary
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2Config,
    Gemma2RotaryEmbedding,
)

CONFIG = Gemma2Config(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attn_implementation="eager",
    sliding_window=5,
    attn_logit_softcapping=2.0,
    query_pre_attn_scalar=24,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
)


def build() -> torch.nn.Module:
    return Gemma2Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(Gemma2RotaryEmbedding(CONFIG), x), causal_mask(x.shape[1], CONFIG.sliding_window))[0]
