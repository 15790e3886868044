"""Qwen3.5's gated delta rule."""

import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

CONFIG = Qwen3_5TextConfig(
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
    return Qwen3_5GatedDeltaNet(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)
