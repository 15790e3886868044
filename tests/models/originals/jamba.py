"""Jamba's mixer."""

import torch
from transformers.models.jamba.modeling_jamba import JambaConfig, JambaMambaMixer

CONFIG = JambaConfig(hidden_size=16, mamba_d_state=4, mamba_dt_rank=3, mamba_d_conv=4, mamba_expand=2)
WIDTH = 16


def build() -> torch.nn.Module:
    return JambaMambaMixer(CONFIG, layer_idx=0)
