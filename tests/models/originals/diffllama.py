"""DiffLlama's attention."""

import torch
from tests.models.originals.common import GROUPED_QUERIES, causal_mask, rotary
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaConfig,
    DiffLlamaRotaryEmbedding,
)

CONFIG = DiffLlamaConfig(
    **GROUPED_QUERIES,
    rms_norm_eps=1e-5,
)


def build() -> torch.nn.Module:
    return DiffLlamaAttention(CONFIG, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, rotary(DiffLlamaRotaryEmbedding(CONFIG), x), causal_mask(x.shape[1]))[0]
