"""Bloom's attention."""

import torch
from tests.models.originals.common import causal_mask
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomConfig, build_alibi_tensor

CONFIG = BloomConfig(hidden_size=32, n_head=4, hidden_dropout=0.0)


def build() -> torch.nn.Module:
    return BloomAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    alibi = build_alibi_tensor(torch.ones(x.shape[:2]), CONFIG.n_head, torch.float32)
    return layer(x, torch.zeros_like(x), alibi, causal_mask(x.shape[1]))[0]
