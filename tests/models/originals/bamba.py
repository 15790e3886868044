"""Bamba's Mamba-2 mixer."""

import torch
from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

CONFIG = BambaConfig(
    hidden_size=16,
    num_hidden_layers=1,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=4,
    mamba_d_conv=4,
    mamba_expand=2,
    attn_layer_indices=[],
)
WIDTH = 16


def build() -> torch.nn.Module:
    return BambaMixer(CONFIG, layer_idx=0)
