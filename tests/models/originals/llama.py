"""Llama's attention."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, causal_mask, rotary
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaRotaryEmbedding

CONFIG = LlamaConfig(**GROUPED_QUERIES)


def build() -> torch.nn.Module:
    return LlamaAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(LlamaRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1]))[0]
