"""RWKV-4's time mixing."""

import math

import torch
from transformers.models.rwkv.modeling_rwkv import RwkvConfig, RwkvSelfAttention

CONFIG = RwkvConfig(hidden_size=16, attention_hidden_size=24, num_hidden_layers=1)
WIDTH = 16
PACKED = False


def build() -> torch.nn.Module:
    layer = RwkvSelfAttention(CONFIG)
    with torch.no_grad():  # the values with which training begins, decays from slow to fast
        layer.time_decay.copy_(torch.linspace(-5, 3, CONFIG.attention_hidden_size))
        layer.time_first.fill_(math.log(0.3))
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]
