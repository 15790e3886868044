"""Forward pass of the cross-entropy in Triton."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import FAMILY, CrossEntropy, CrossEntropyResiduals, power_of_two
from ejkernel.types.pullback import is_differentiated
from ejkernel_triton.cross_entropy import plan
from ejkernel_triton.cross_entropy.config import LossTiles
from ejkernel_triton.cross_entropy.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: CrossEntropy, config: LossTiles) -> tuple[Any, CrossEntropyResiduals]:
    """Returns the losses of a record.

    Args:
        record: The canonical arguments.
        config: Blocks, tiles and warps.

    Returns:
        The family's output; and the gradients, if a backward pass follows, its cotangent is one number and the logits
        are not given. They need the logits that the losses need, which the backward pass would compute again.
    """
    if record.lm_head is None:
        outputs, gradients = token_losses(record, record.inputs, config), {}
    else:
        outputs, gradients = _losses_of_blocks(record, config)
    loss, *others = outputs
    loss = jnp.sum(loss, keepdims=True) if record.sum_over_tokens else loss
    return (loss, *others), CrossEntropyResiduals(**gradients)


def _losses_of_blocks(record: CrossEntropy, config: LossTiles) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Returns the outputs of all tokens, without a sum, and the gradients if they are to be kept."""
    tokens, keeps_gradients = record.weights.shape[0], record.sum_over_tokens and is_differentiated()
    scale = power_of_two(jnp.max(jnp.abs(record.weights.astype(jnp.float32)), initial=0))

    def add(block: plan.TokenBlock, carry: Any) -> Any:
        outputs, sums = carry
        part = plan.select_tokens(record, block)
        logits = plan.block_logits(part, config)
        if keeps_gradients:
            token_scale = power_of_two(jnp.abs(part.weights.astype(jnp.float32)))
            logit_gradient, *results = _losses_and_gradient(part, logits, token_scale, config)
            sums = plan.add_block(sums, part, logit_gradient, token_scale, block, scale)
        else:
            results = token_losses(part, logits, config)
        return tuple(block.replace(whole, x) for whole, x in zip(outputs, results, strict=True)), sums

    grad_fields = frozenset(FAMILY.differentiable) if keeps_gradients else frozenset[str]()
    start = (
        tuple(jnp.zeros(tokens, jnp.float32) for _ in range(4)),
        plan.zero_gradients(record, grad_fields, config),
    )
    outputs, sums = plan.loop_over_blocks(tokens, config.block_t, add, start)
    return outputs, plan.finish_gradients(sums, record, scale)


def token_losses(record: CrossEntropy, logits: jax.Array, config: LossTiles) -> tuple[jax.Array, ...]:
    """Returns losses, log-sum-exps, largest logits and their entries, [T] float32 each, of logits [T, V] without bias
    and cap.
    """
    from ejkernel_triton.cross_entropy.kernels.cross_entropy_fwd import cross_entropy_fwd_kernel

    tokens = record.weights.shape[0]
    results = launch(
        cross_entropy_fwd_kernel,
        (*token_arrays(record), logits[None], *entry_arrays(record)),
        (ShapeDtype((1, tokens), jnp.float32),) * 4,
        batch=1,
        grid=tokens,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": make_spec(record, logits.dtype, config)},
    )
    return tuple(x[0] for x in results)


def _losses_and_gradient(
    record: CrossEntropy, logits: jax.Array, token_scale: jax.Array, config: LossTiles
) -> tuple[jax.Array, ...]:
    """Returns the gradient of the logits [T, V] in the dtype of inputs, each token's divided by its scale, and what
    `token_losses` returns.
    """
    from ejkernel_triton.cross_entropy.kernels.cross_entropy_fwd_bwd import cross_entropy_fwd_bwd_kernel

    tokens, in_place = record.weights.shape[0], logits.dtype == record.inputs.dtype
    gradient_weights = record.weights.astype(jnp.float32) / token_scale
    results = launch(
        cross_entropy_fwd_bwd_kernel,
        (*token_arrays(record), gradient_weights[None], logits[None], *entry_arrays(record)),
        (
            3 if in_place else ShapeDtype((1, *logits.shape), record.inputs.dtype),
            *(ShapeDtype((1, tokens), jnp.float32),) * 4,
        ),
        batch=1,
        grid=tokens,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": make_spec(record, logits.dtype, config, in_place=in_place)},
    )
    return tuple(x[0] for x in results)


def token_arrays(record: CrossEntropy) -> tuple[jax.Array, jax.Array]:
    """Returns targets and weights as the kernels read them.

    They come before the logits: the first array is passed for those that are absent, and logits that are passed twice
    cannot be replaced without a copy.
    """
    return record.targets[None], record.weights.astype(jnp.float32)[None]


def entry_arrays(record: CrossEntropy) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns soft targets and bias as the kernels read them; None for those that are absent."""
    return tuple(None if x is None else x[None] for x in (record.soft_targets, record.lm_head_bias))  # type: ignore[return-value]
