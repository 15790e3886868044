"""GPT-OSS's experts."""

import numpy as np
import torch
from tests.models.originals.common import initialise_router
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

CONFIG = GptOssConfig(
    hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=1.5
)
PACKED = False  # a token's result does not depend on the others


def build() -> torch.nn.Module:
    layer = GptOssMLP(CONFIG)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return layer


def initialise(layer: torch.nn.Module, rng: np.random.Generator) -> None:
    initialise_router(layer, layer.router, rng)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]
