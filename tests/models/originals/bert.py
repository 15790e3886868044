"""BERT's attention."""

import torch
from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention

CONFIG = BertConfig(hidden_size=32, num_attention_heads=4, attn_implementation="eager")


def build() -> torch.nn.Module:
    return BertSelfAttention(CONFIG)


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]
