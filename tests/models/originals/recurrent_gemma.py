"""RecurrentGemma's recurrent block."""

import torch
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaConfig,
    RecurrentGemmaRecurrentBlock,
)

CONFIG = RecurrentGemmaConfig(hidden_size=16, lru_width=16, num_attention_heads=2, conv1d_width=4, num_hidden_layers=3)
WIDTH = 16


def build() -> torch.nn.Module:
    layer = RecurrentGemmaRecurrentBlock(CONFIG, layer_idx=0)
    for parameter in layer.rg_lru.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, torch.arange(x.shape[1])[None], None, use_cache=False)[0]
