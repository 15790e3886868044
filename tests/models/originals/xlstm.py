"""xLSTM's mLSTM layer."""

import torch
from transformers.models.xlstm.modeling_xlstm import xLSTMConfig, xLSTMLayer

CONFIG = xLSTMConfig(
    hidden_size=16,
    num_heads=2,
    num_hidden_layers=1,
    mode="inference",
    return_last_states=True,
    chunk_size=16,
    autocast_kernel_dtype="float32",
)
WIDTH = 16


def build() -> torch.nn.Module:
    return xLSTMLayer(CONFIG)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]
