"""MiniMax's lightning attention."""

import torch
from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention

CONFIG = MiniMaxConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    block_size=8,
)


def build() -> torch.nn.Module:
    return MiniMaxLightningAttention(CONFIG, layer_idx=1)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, None, None)[0]
