"""Falcon H1's Mamba-2 mixer: multipliers, limits of the step sizes, and a norm before the gate."""

import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Config, FalconH1Mixer, compute_mup_vector

CONFIG = FalconH1Config(
    hidden_size=16,
    num_hidden_layers=1,
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=4,
    mamba_d_conv=4,
    mamba_rms_norm=True,
    mamba_norm_before_gate=True,
    time_step_limit=(0.5, 2.0),
    ssm_in_multiplier=0.5,
    ssm_multipliers=[1.5, 0.75, 1.25, 0.5, 2.0],
)
WIDTH = 16


def build() -> torch.nn.Module:
    layer = FalconH1Mixer(CONFIG, layer_idx=0)
    layer.register_buffer("mup_vector", compute_mup_vector(CONFIG), persistent=False)
    return layer
