"""Qwen3-Next's gated delta rule."""

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

CONFIG = Qwen3NextConfig(
    hidden_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)
WIDTH = 16


def build() -> torch.nn.Module:
    return Qwen3NextGatedDeltaNet(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)
