"""Kimi Linear's delta attention."""

import torch
from tests.models.originals.common import LINEAR_LAYERS
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearConfig, KimiLinearDeltaAttention

CONFIG = KimiLinearConfig(
    hidden_size=16,
    linear_num_heads=2,
    linear_head_dim=8,
    **LINEAR_LAYERS,
)
WIDTH = 16


def build() -> torch.nn.Module:
    layer = KimiLinearDeltaAttention(CONFIG, layer_idx=0)
    torch.nn.init.zeros_(layer.forget_gate.dt_bias)
    return layer
