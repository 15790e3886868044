"""Mixtral's experts."""

import numpy as np
import torch
from tests.models.originals.common import initialise_router
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

CONFIG = MixtralConfig(hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
PACKED = False  # a token's result does not depend on the others


def build() -> torch.nn.Module:
    return MixtralSparseMoeBlock(CONFIG)


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    initialise_router(layer, layer.gate, rng)
