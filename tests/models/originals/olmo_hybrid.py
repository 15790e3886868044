"""OLMo Hybrid's gated delta rule, with values of another size than the keys."""

import torch
from tests.models.originals.common import LINEAR_LAYERS
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridConfig, OlmoHybridGatedDeltaNet

CONFIG = OlmoHybridConfig(
    hidden_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    linear_a_log_min=1.0,
    **LINEAR_LAYERS,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return OlmoHybridGatedDeltaNet(CONFIG, layer_idx=0)
