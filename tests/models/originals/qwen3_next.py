"""Qwen3-Next's gated delta rule."""

import torch
from tests.models.originals.common import GATED_DELTA, LINEAR_LAYERS
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

CONFIG = Qwen3NextConfig(
    **GATED_DELTA,
    **LINEAR_LAYERS,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return Qwen3NextGatedDeltaNet(CONFIG, layer_idx=0)
