"""The delta attention of Ling (Bailing), with its bounded gate."""

import torch
from tests.models.originals.common import LINEAR_LAYERS
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
    BailingHybridConfig,
    BailingHybridDeltaAttention,
)

CONFIG = BailingHybridConfig(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    **LINEAR_LAYERS,
)
WIDTH = 16


def build() -> torch.nn.Module:
    layer = BailingHybridDeltaAttention(CONFIG, layer_idx=0)
    torch.nn.init.zeros_(layer.forget_gate.dt_bias)
    torch.nn.init.zeros_(layer.forget_gate.A_log)
    return layer
