"""Trees of draft tokens, as speculative decoding verifies them: the parent and the ancestors of each token.

The tokens of a request form a tree if each one continues an earlier one, or the request's stored state. `parents` names
that token by its index among the tokens of the same request, and the stored state by -1:

    parents   -1  0  0  1          state -> 0 -> 1 -> 3
                                             \\-> 2
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.planning import packing


class TokenTrees(NamedTuple):
    """The trees of all requests, over the tokens of all rows: token t of row b has index `b * T + t`.

    Attributes:
        parents: [B * T] int32, index of each token's parent; -1 where that is the request's state.
        requests: [B * T] int32, the request of each token: its row, or its packed sequence; -1 for padding tokens.
        starts: [N] int32, the first token of each request.
        lengths: [N] int32, the number of its tokens.
    """

    parents: jax.Array
    requests: jax.Array
    starts: jax.Array
    lengths: jax.Array


def token_trees(parents: jax.Array, cu_seqlens: jax.Array | None = None) -> TokenTrees:
    """Returns the trees of a call.

    Args:
        parents: [B, T] int; may be traced. A value that is not below the token's own index counts as the token before.
        cu_seqlens: [N + 1] int, with B = 1: the packed sequences; None where each row is a request.
    """
    rows, tokens = parents.shape
    if cu_seqlens is None:
        starts = jnp.arange(rows, dtype=jnp.int32) * tokens
        lengths = jnp.full(rows, tokens, jnp.int32)
        requests = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), tokens)
    else:
        bounds = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens)
        starts, lengths = bounds[:-1], jnp.diff(bounds)
        requests = packing.packed_ids(cu_seqlens, tokens)[0][0]
    start = starts[jnp.maximum(requests, 0)]
    position = jnp.arange(rows * tokens, dtype=jnp.int32) - start
    local = jnp.minimum(parents.reshape(-1).astype(jnp.int32), position - 1)  # no index is out of bounds
    return TokenTrees(jnp.where((local < 0) | (requests < 0), -1, start + local), requests, starts, lengths)


def path_windows(x: jax.Array, states: jax.Array, trees: TokenTrees) -> jax.Array:
    """Returns the tokens before each token along its path from the request's state, the oldest first: [B * T, C, S].

    Args:
        x: [B * T, C], all tokens.
        states: [N, C, S], the tokens before each request.
        trees: The trees.
    """
    held, request = states.shape[2], jnp.maximum(trees.requests, 0)
    ancestor, depth, columns = jnp.arange(x.shape[0], dtype=jnp.int32), jnp.zeros(x.shape[0], jnp.int32), []
    for back in range(1, held + 1):
        ancestor = jnp.where(ancestor < 0, -1, trees.parents[jnp.maximum(ancestor, 0)])
        depth = depth + (ancestor >= 0)
        stored = states[request, :, jnp.clip(held - back + depth, 0, held - 1)].astype(x.dtype)
        columns.append(jnp.where((ancestor >= 0)[:, None], x[jnp.maximum(ancestor, 0)], stored))
    return jnp.stack(columns[::-1], axis=2)
