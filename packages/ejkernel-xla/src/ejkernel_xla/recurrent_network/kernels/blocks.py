"""The tokens of a direction in blocks: the inputs of a block are multiplied at once, and the products fit a cache."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv, is_symbolic
from ejkernel.families.recurrent_network import RecurrentNetwork, real_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of the same length, with padding after the token that is read last.

    Attributes:
        tokens: How many there are to read.
        length: Tokens per block.
        backwards: Whether they are read from the last to the first.
    """

    tokens: int
    length: int
    backwards: bool

    @classmethod
    def of(cls, record: RecurrentNetwork, max_tokens: int, backwards: bool) -> "Blocks":
        """Returns the fewest blocks of at most `max_tokens` tokens, with as little padding as possible."""
        tokens = record.x.shape[1]
        if is_symbolic(tokens):
            return cls(tokens=tokens, length=max_tokens, backwards=backwards)
        count = cdiv(tokens, max(1, min(max_tokens, tokens)))
        return cls(tokens=tokens, length=cdiv(tokens, count), backwards=backwards)

    @property
    def count(self) -> int:
        """Returns how many blocks there are."""
        return cdiv(self.tokens, self.length)

    @property
    def padding(self) -> int:
        """Returns the number of padding tokens."""
        return self.count * self.length - self.tokens

    def cut(self, x: jax.Array) -> jax.Array:
        """Returns [T, ...] to [blocks, length, ...]; padding is 0."""
        if self.padding:
            ends = (self.padding, 0) if self.backwards else (0, self.padding)
            x = jnp.pad(x, (ends, *((0, 0),) * (x.ndim - 1)))
        return x.reshape(self.count, self.length, *x.shape[1:])

    def merge(self, x: jax.Array) -> jax.Array:
        """Returns [blocks, length, ...] to [T, ...]."""
        x = x.reshape(self.count * self.length, *x.shape[2:])
        return x[self.padding :] if self.backwards else x[: self.tokens]

    def valid(self, record: RecurrentNetwork) -> jax.Array | None:
        """Returns which tokens of each block are no padding, bool [blocks, length, B or 1, 1]; None for all."""
        tokens = real_tokens(record)
        if tokens is None and not self.padding:
            return None
        tokens = jnp.ones((1, self.tokens), bool) if tokens is None else tokens
        return self.cut(tokens.T[..., None])
