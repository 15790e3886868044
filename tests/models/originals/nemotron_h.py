"""Nemotron-H's Mamba-2 mixer."""

import torch
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer

CONFIG = NemotronHConfig(
    hidden_size=16,
    layers_block_type=["mamba"],
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=4,
    conv_kernel=4,
    time_step_min=0.4,
)
WIDTH = 16


def build() -> torch.nn.Module:
    return NemotronHMamba2Mixer(CONFIG, layer_idx=0)
