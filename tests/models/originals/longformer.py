"""Longformer's attention: a window, and tokens that attend and are attended by all."""

import torch
from transformers.models.longformer.modeling_longformer import LongformerConfig, LongformerSelfAttention

CONFIG = LongformerConfig(
    hidden_size=32, num_attention_heads=4, attention_window=[6], attention_probs_dropout_prob=0.0, num_hidden_layers=1
)
PACKED = False
TOKENS = 24
GLOBAL = (0, 10)


def build() -> torch.nn.Module:
    return LongformerSelfAttention(CONFIG, layer_id=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[:2])
    mask[:, GLOBAL] = 10000.0
    return layer(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=True,
    )[0]
