"""GPT-OSS's attention with a window."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, WINDOW_LAYERS, causal_mask, rotary
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssAttention,
    GptOssConfig,
    GptOssRotaryEmbedding,
)

CONFIG = GptOssConfig(
    **GROUPED_QUERIES,
    sliding_window=5,
    **WINDOW_LAYERS,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def build() -> torch.nn.Module:
    layer = GptOssAttention(CONFIG, layer_idx=0)
    torch.nn.init.zeros_(layer.sinks)
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(GptOssRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1], CONFIG.sliding_window))[0]
