"""LFM2's short convolution."""

import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv

CONFIG = Lfm2Config(hidden_size=16, conv_L_cache=3, num_hidden_layers=2, layer_types=["conv", "full_attention"])
WIDTH = 16


def build() -> torch.nn.Module:
    return Lfm2ShortConv(CONFIG, layer_idx=0)
