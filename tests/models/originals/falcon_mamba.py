"""Falcon Mamba's mixer."""

import torch
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaConfig, FalconMambaMixer

CONFIG = FalconMambaConfig(
    hidden_size=16,
    state_size=4,
    intermediate_size=32,
    time_step_rank=3,
    conv_kernel=4,
    expand=2,
    num_hidden_layers=1,
)
WIDTH = 16


def build() -> torch.nn.Module:
    layer = FalconMambaMixer(CONFIG, layer_idx=0, initialize_mixer_weights=False)
    states = torch.arange(1, CONFIG.state_size + 1).expand_as(layer.A_log)
    with torch.no_grad():
        layer.A_log.copy_(torch.log(states))
        layer.D.fill_(1.0)
        layer.dt_proj.bias.fill_(-1.0)
    return layer
