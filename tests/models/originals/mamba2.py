"""Mamba-2's mixer."""

import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

CONFIG = Mamba2Config(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=2, expand=2, conv_kernel=4)
WIDTH = 16


def build() -> torch.nn.Module:
    return Mamba2Mixer(CONFIG, layer_idx=0)
