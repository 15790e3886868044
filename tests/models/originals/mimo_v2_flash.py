"""MiMo V2 Flash's attention with a window."""

import torch
from tests.models.originals.common import WINDOW_LAYERS, causal_mask
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashAttention,
    MiMoV2FlashConfig,
    MiMoV2FlashRotaryEmbedding,
)

CONFIG = MiMoV2FlashConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=12,
    v_head_dim=8,
    attention_value_scale=0.707,
    attn_implementation="eager",
    sliding_window=5,
    **WINDOW_LAYERS,
)


def build() -> torch.nn.Module:
    layer = MiMoV2FlashAttention(CONFIG, layer_idx=0)
    torch.nn.init.zeros_(layer.sinks)
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(
        x,
        MiMoV2FlashRotaryEmbedding(CONFIG)(x, torch.arange(x.shape[1])[None], "sliding_attention"),
        causal_mask(x.shape[1], CONFIG.sliding_window),
    )[0]
