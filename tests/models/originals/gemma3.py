"""Gemma 3's attention with a window."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, WINDOW_LAYERS, causal_mask
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3RotaryEmbedding,
    Gemma3TextConfig,
)

CONFIG = Gemma3TextConfig(
    **GROUPED_QUERIES,
    sliding_window=5,
    query_pre_attn_scalar=24,
    **WINDOW_LAYERS,
)


def build() -> torch.nn.Module:
    return Gemma3Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x,
        Gemma3RotaryEmbedding(CONFIG)(x, torch.arange(x.shape[1])[None], "sliding_attention"),
        causal_mask(x.shape[1], CONFIG.sliding_window),
    )[0]
