"""Nemotron-H's experts without a gate, between two projections to a smaller width."""

import numpy as np
import torch
from tests.models.originals.common import draw, initialise_router
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMoE

CONFIG = NemotronHConfig(
    hidden_size=32,
    layers_block_type=["moe"],
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
    moe_latent_size=20,
    n_routed_experts=6,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
)
PACKED = False  # a token's result does not depend on the others
BUFFERS = ("gate.e_score_correction_bias",)


def build() -> torch.nn.Module:
    return NemotronHMoE(CONFIG, layer_idx=0)


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    initialise_router(layer, layer.gate, rng)
    with torch.no_grad():
        layer.gate.e_score_correction_bias.copy_(draw(rng, (6,), 0.3))
