"""The policy that keeps NaN and infinities of one sequence from other sequences in the same tile of attention."""

from contextlib import AbstractContextManager

from ejkernel.types.block_policy import BlockPolicy

_policy = BlockPolicy()

NOT_ISOLATED_NOTE = (
    "a NaN or infinity of one sequence may reach sequences that share a tile with it; to keep it where it is, at the "
    "cost of a pass over keys and values, make the call under ejkernel.ops.isolate_sequences()"
)
"""The sentence of `explain` for a call of packed attention outside of an `isolate_sequences` block."""


def isolate_sequences() -> AbstractContextManager[None]:
    """Keeps sequences apart that share tiles of attention, in the calls traced inside of the block.

    Dense attention with segment ids or cumulative lengths multiplies weights of 0 with rows of other sequences, and
    0 x NaN is NaN. In the block, no value of a sequence reaches the output or the gradient of another sequence. It
    costs a read and a write of keys and values before the forward kernel, and of five arrays before the backward one.
    Every other operation keeps its requests apart without the block.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention
        from ejkernel.ops import isolate_sequences

        x = jax.random.normal(jax.random.key(0), (1, 8, 1, 16))
        lengths = jnp.array([0, 5, 8])
        with isolate_sequences():
            output = flash_attention(x, x, x.at[:, :5].set(jnp.nan), cum_seqlens_q=lengths)
        assert jnp.isfinite(output[:, 5:]).all()
        ```
    """
    return _policy.block()


def are_sequences_isolated() -> bool:
    """Returns whether an `isolate_sequences` block is around."""
    return _policy.is_on
