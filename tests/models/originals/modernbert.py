"""ModernBERT's attention with a window."""

import torch
from tests.models.originals.common import WINDOW_LAYERS
from transformers.models.modernbert.modeling_modernbert import (
    ModernBertAttention,
    ModernBertConfig,
    ModernBertRotaryEmbedding,
)

CONFIG = ModernBertConfig(
    hidden_size=32,
    num_attention_heads=4,
    local_attention=6,
    **WINDOW_LAYERS,
    attn_implementation="eager",
)


def build() -> torch.nn.Module:
    return ModernBertAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    position = torch.arange(x.shape[1])
    rotary = ModernBertRotaryEmbedding(CONFIG)(x, position[None], "sliding_attention")
    allowed = (position[:, None] - position).abs() <= CONFIG.sliding_window
    mask = torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return layer(x, rotary, mask)[0]
