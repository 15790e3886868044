"""Llama 4's attention over chunks."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, causal_mask
from transformers.models.llama4.modeling_llama4 import (
    Llama4TextAttention,
    Llama4TextConfig,
    Llama4TextRotaryEmbedding,
)

CONFIG = Llama4TextConfig(
    **GROUPED_QUERIES,
    num_hidden_layers=1,
    no_rope_layers=[1],
    attention_chunk_size=8,
)


def build() -> torch.nn.Module:
    return Llama4TextAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    token = torch.arange(x.shape[1])
    chunk = token // CONFIG.attention_chunk_size
    mask = causal_mask(x.shape[1]).masked_fill(chunk[:, None] != chunk, torch.finfo(torch.float32).min)
    return layer(x, Llama4TextRotaryEmbedding(CONFIG)(x, token[None]), mask)[0]
