"""Forward pass of the cross-entropy of hidden states, with logits from the grouped matmul's kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy, CrossEntropyResiduals
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops.device import current_device
from ejkernel_triton.cross_entropy import plan
from ejkernel_triton.cross_entropy.config import LossTiles
from ejkernel_triton.cross_entropy.forward import token_losses
from ejkernel_triton.grouped_matmul import config as grouped_config
from ejkernel_triton.grouped_matmul.forward import forward as grouped_forward


def forward(record: CrossEntropy, config: LossTiles) -> tuple[Any, CrossEntropyResiduals]:
    """Returns the losses of a record.

    Args:
        record: The canonical arguments.
        config: Blocks, tiles and warps.

    Returns:
        The family's output, and no gradients.
    """
    tokens = record.weights.shape[0]

    def add(block: plan.TokenBlock, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block_record = plan.select_tokens(record, block)
        results = token_losses(block_record, ordered_logits(block_record, config), config)
        return tuple(block.replace(whole, x) for whole, x in zip(outputs, results, strict=True))

    start = tuple(jnp.zeros(tokens, jnp.float32) for _ in range(4))
    loss, *others = plan.loop_over_blocks(tokens, config.block_t, add, start)
    loss = jnp.sum(loss, keepdims=True) if record.sum_over_tokens else loss
    return (loss, *others), CrossEntropyResiduals()


def ordered_logits(record: CrossEntropy, config: LossTiles) -> jax.Array:
    """Returns the logits of a block's record, without bias and cap.

    They are a product with one group, in the grouped matmul's configuration for a `batch_invariant` block, in which a
    row has the same sums in a call of any number of rows.
    """
    assert record.lm_head is not None  # the logits are not given
    product = GroupedMatmul(
        lhs=record.inputs,
        rhs=record.lm_head[None],
        group_sizes=jnp.full(1, record.inputs.shape[0], jnp.int32),
        out_dtype=jnp.dtype(jnp.float32 if config.float32_logits else record.inputs.dtype),
        transpose_rhs=False,
        left_over="undefined",
    )
    return grouped_forward(product, grouped_config.batch_invariant(product, current_device(), "forward"))[0]
