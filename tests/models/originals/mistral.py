"""Mistral's attention."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, causal_mask, rotary
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralConfig,
    MistralRotaryEmbedding,
)

CONFIG = MistralConfig(
    **GROUPED_QUERIES,
    sliding_window=5,
)


def build() -> torch.nn.Module:
    return MistralAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(MistralRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1], CONFIG.sliding_window))[0]
