"""BigBird's attention to a window of blocks, the first and last block, and random blocks."""

import numpy as np
import torch
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdConfig, BigBirdModel

BLOCK, SEED = 4, 3
CONFIG = BigBirdConfig(
    hidden_size=32, num_attention_heads=4, block_size=BLOCK, num_random_blocks=1, max_position_embeddings=64
)
PACKED = False
TOKENS = 40
BUFFERS = ("random_blocks",)


def build() -> torch.nn.Module:
    layer = BigBirdBlockSparseAttention(CONFIG, seed=SEED)
    layer.train()  # in evaluation transformers takes the first block instead of random ones
    lengths, counts = layer._get_rand_attn_plan(TOKENS, BLOCK, CONFIG.num_random_blocks)
    np.random.seed(SEED)
    blocks = layer._bigbird_block_rand_mask_with_head(
        from_seq_length=TOKENS,
        to_seq_length=TOKENS,
        from_block_size=BLOCK,
        to_block_size=BLOCK,
        num_heads=CONFIG.num_attention_heads,
        plan_from_length=lengths,
        plan_num_rand_blocks=counts,
    )
    layer.register_buffer("random_blocks", torch.tensor(np.stack(blocks), dtype=torch.float32))
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer.train()
    blocked, band, before, after = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(x.shape[:2]), BLOCK)
    return layer(x, band, before, after, blocked, blocked)[0]
