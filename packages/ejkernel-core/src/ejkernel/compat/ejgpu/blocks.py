"""Random lists of the key blocks that each token attends to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ejkernel.arithmetic import cdiv
from ejkernel.compat.sample_inputs import random_blocks
from ejkernel.modules.operations.shared.shapes import as_count


def generate_block_indices(
    batch_size: int, sequence_length: int, kv_heads: int, num_blocks_per_token: int, block_size: int, seed: int = 0
) -> Int32[Array, "b t h s"]:
    """Returns random blocks for every **token**, as native sparse attention takes them.

    Token t chooses among the `max(1, ceil(t / block_size))` blocks that begin before it, in ascending order; slots that
    are left over hold `sequence_length`, which is no block. `ejkernel.utils` has a function of the same name that
    counts blocks of queries.

    Args:
        batch_size: Rows.
        sequence_length: Tokens of a row.
        kv_heads: KV heads.
        num_blocks_per_token: Slots per token.
        block_size: Tokens of a block.
        seed: Equal seeds give equal blocks.

    Returns:
        [batch_size, sequence_length, kv_heads, num_blocks_per_token] int32.

    Raises:
        ValueError: A size is no int of at least 1.

    Example:
        ```python
        from ejkernel import ejgpu

        blocks = ejgpu.generate_block_indices(1, 64, 2, 3, block_size=16)
        assert blocks.shape == (1, 64, 2, 3)
        assert blocks[0, 0, 0].tolist() == [0, 64, 64]
        ```
    """
    size = as_count("block_size", block_size, minimum=1)
    tokens = jnp.arange(as_count("sequence_length", sequence_length, minimum=1))
    count = cdiv(sequence_length, size)
    sizes = (batch_size, kv_heads, num_blocks_per_token)
    blocks = random_blocks(jax.random.key(seed), jnp.maximum(1, cdiv(tokens, size)), count, sizes)
    return jnp.where(blocks == count, sequence_length, blocks)
