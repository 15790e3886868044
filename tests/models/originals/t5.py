"""T5's attention in its first encoder layer."""

import torch
from transformers.models.t5.modeling_t5 import T5Attention, T5Config

CONFIG = T5Config(
    d_model=32,
    num_heads=4,
    d_kv=8,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    attn_implementation="eager",
)
PACKED = False


def build() -> torch.nn.Module:
    return T5Attention(CONFIG, has_relative_attention_bias=True, layer_idx=0)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]
