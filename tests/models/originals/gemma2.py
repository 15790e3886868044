"""Gemma 2's attention with a window."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, WINDOW_LAYERS, causal_mask, rotary
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2Config,
    Gemma2RotaryEmbedding,
)

CONFIG = Gemma2Config(
    **GROUPED_QUERIES,
    sliding_window=5,
    attn_logit_softcapping=2.0,
    query_pre_attn_scalar=24,
    **WINDOW_LAYERS,
)


def build() -> torch.nn.Module:
    return Gemma2Attention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(Gemma2RotaryEmbedding(CONFIG), x), causal_mask(x.shape[1], CONFIG.sliding_window))[0]
