"""The policy that makes calls differentiable in forward mode."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ejkernel.types.block_policy import BlockPolicy

_policy = BlockPolicy()


def forward_mode() -> AbstractContextManager[None]:
    """Makes the calls that are traced in the block differentiable by `jax.jvp` and `jax.linearize`.

    XLA computes tangents and output in one pass, in the memory of a forward pass; `explain` says by which function.
    `jax.grad` in the block still runs the chosen backward pass. `jax.hessian` and Hessian-vector products work too, in
    every composition of modes with at most one reverse mode.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention
        from ejkernel.ops import forward_mode

        x = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))
        with forward_mode():
            output, tangent = jax.jvp(lambda x: flash_attention(x, x, x, causal=True), (x,), (jnp.cos(x),))
        assert output.shape == tangent.shape == x.shape
        ```
    """
    return _policy.block()


def is_forward_mode_enabled() -> bool:
    """Returns whether a `forward_mode` block is active."""
    return _policy.is_on


def reverse_rule(rule: Any) -> Any:
    """Returns a function with a `jax.custom_vjp` that is the plain function in a `forward_mode` block, since JAX cannot
    differentiate a `jax.custom_vjp` in forward mode.

    Args:
        rule: The function, as `jax.custom_vjp` returns it. Its `defvjp` is the result's.
    """
    plain: Callable[..., Any] = rule.fun

    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        return plain(*args) if is_forward_mode_enabled() else rule(*args)

    result: Any = run
    result.defvjp = rule.defvjp
    return result
