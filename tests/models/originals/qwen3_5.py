"""Qwen3.5's gated delta rule."""

import torch
from tests.models.originals.common import GATED_DELTA, LINEAR_LAYERS
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

CONFIG = Qwen3_5TextConfig(
    **GATED_DELTA,
    **LINEAR_LAYERS,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return Qwen3_5GatedDeltaNet(CONFIG, layer_idx=0)
