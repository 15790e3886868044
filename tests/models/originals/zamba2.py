"""Zamba2's Mamba-2 mixer."""

import torch
from transformers.models.zamba2.modeling_zamba2 import Zamba2Config, Zamba2MambaMixer

CONFIG = Zamba2Config(
    hidden_size=16,
    num_hidden_layers=1,
    layers_block_type=["mamba"],
    n_mamba_heads=4,
    mamba_ngroups=2,
    mamba_d_state=4,
    mamba_d_conv=4,
    mamba_expand=2,
    time_step_min=0.4,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return Zamba2MambaMixer(CONFIG, layer_idx=0)
