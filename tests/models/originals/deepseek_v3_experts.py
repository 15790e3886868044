"""DeepSeek V3's routing and experts."""

import numpy as np
import torch
from tests.models.originals.common import draw, initialise_router
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

CONFIG = DeepseekV3Config(
    hidden_size=32,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
)
PACKED = False  # a token's result does not depend on the others
BUFFERS = ("gate.e_score_correction_bias",)


def build() -> torch.nn.Module:
    return DeepseekV3MoE(CONFIG)


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    initialise_router(layer, layer.gate, rng)
    with torch.no_grad():
        layer.gate.e_score_correction_bias.copy_(draw(rng, (8,), 0.3))
