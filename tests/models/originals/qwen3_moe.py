"""Qwen3's experts."""

import numpy as np
import torch
from tests.models.originals.common import initialise_router
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

CONFIG = Qwen3MoeConfig(
    hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False
)
PACKED = False  # a token's result does not depend on the others


def build() -> torch.nn.Module:
    return Qwen3MoeSparseMoeBlock(CONFIG)


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    initialise_router(layer, layer.gate, rng)
