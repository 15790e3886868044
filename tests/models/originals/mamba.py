"""Mamba's mixer."""

import torch
from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

CONFIG = MambaConfig(hidden_size=16, state_size=4, intermediate_size=32, time_step_rank=3, conv_kernel=4, expand=2)
WIDTH = 16


def build() -> torch.nn.Module:
    return MambaMixer(CONFIG, layer_idx=0)
