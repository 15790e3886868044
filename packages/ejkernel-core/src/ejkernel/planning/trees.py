"""Trees of draft tokens, as speculative decoding verifies them: the parent and the ancestors of each token.

The tokens of a request form a tree if each one continues an earlier one, or the request's stored state. `parents` names
that token by its index among the tokens of the same request, and the stored state by -1:

    parents   -1  0  0  1          state -> 0 -> 1 -> 3
                                             \\-> 2
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning import packing
from ejkernel.types.forward_mode import reverse_rule


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


def paths_of_tokens(parents: jax.Array, last: jax.Array, cu_seqlens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens on the path to a token of each request, one request after the other.

    Args:
        parents: [T] int32, by index among a request's tokens.
        last: [N] int32, the token at the path's end, by the same index; -1, or one past the request's tokens: no path.
        cu_seqlens: [N + 1] int32.

    Returns:
        The tokens [T] int32, zeros after all paths, and the cumulative lengths of the paths [N + 1] int32.
    """
    trees, count = token_trees(parents[None], cu_seqlens), parents.shape[0]
    ends = jnp.where((last >= 0) & (last < trees.lengths), trees.starts + last, -1)

    def to_parent(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, on_path = carry
        on_path = on_path.at[jnp.where(token < 0, count, token)].set(True, mode="drop")
        return jnp.where(token < 0, -1, trees.parents[jnp.maximum(token, 0)]), on_path

    _, on_path = lax.while_loop(lambda carry: jnp.any(carry[0] >= 0), to_parent, (ends, jnp.zeros(count, bool)))
    # Parents come first and requests are in order, so that the tokens of all paths are in order too.
    rank = jnp.cumsum(on_path) - 1
    tokens = jnp.zeros(count, jnp.int32).at[jnp.where(on_path, rank, count)].set(jnp.arange(count), mode="drop")
    lengths = (
        jnp.zeros(last.shape[0], jnp.int32).at[jnp.where(on_path, trees.requests, last.shape[0])].add(1, mode="drop")
    )
    return tokens, jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])


def path_windows(x: jax.Array, states: jax.Array, trees: TokenTrees) -> jax.Array:
    """Returns the tokens before each token along its path from the request's state, the oldest first: [B * T, C, S].

    Args:
        x: [B * T, C], all tokens.
        states: [N, C, S], the tokens before each request.
        trees: The trees.
    """
    held, request = states.shape[2], jnp.maximum(trees.requests, 0)
    held_tokens = jnp.moveaxis(states, 2, 1).reshape(-1, states.shape[1])
    ancestor, depth, columns = jnp.arange(x.shape[0], dtype=jnp.int32), jnp.zeros(x.shape[0], jnp.int32), []
    for back in range(1, held + 1):
        ancestor = jnp.where(ancestor < 0, -1, trees.parents[jnp.maximum(ancestor, 0)])
        depth = depth + (ancestor >= 0)
        stored = rows_with_ordered_gradients(
            held_tokens, request * held + jnp.clip(held - back + depth, 0, held - 1)
        ).astype(x.dtype)
        columns.append(
            jnp.where((ancestor >= 0)[:, None], rows_with_ordered_gradients(x, jnp.maximum(ancestor, 0)), stored)
        )
    return jnp.stack(columns[::-1], axis=2)


@reverse_rule
@jax.custom_vjp
def rows_with_ordered_gradients(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of x, whose gradients are summed in a fixed order.

    XLA adds up the gradients of an indexed array with atomic operations on a GPU, so that two runs may differ in their
    bits where rows are read more than once, as siblings read their parent's.

    Args:
        x: [N, C].
        index: [M] int32, from 0 to N - 1.
    """
    return x[index]


def _forward_with_ordered_gradients(x: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x[index], (x, index)


def _ordered_gradients(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    """Returns the gradient of x: sums of sorted rows, from which each row of x takes the last of its own."""
    x, index = saved
    order = jnp.argsort(index, stable=True)
    ordered, rows = index[order], jnp.arange(x.shape[0], dtype=index.dtype)
    begins = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])[:, None]
    addends = cotangent[order].astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    _, sums = lax.associative_scan(_add_within_rows, (begins, addends))
    last = jnp.searchsorted(ordered, rows, side="right") - 1
    is_read = (last >= 0) & (ordered[jnp.maximum(last, 0)] == rows)
    return jnp.where(is_read[:, None], sums[jnp.maximum(last, 0)], 0).astype(x.dtype), None


def _add_within_rows(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of two runs of sorted rows: that of the right alone where a row begins in it."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])


rows_with_ordered_gradients.defvjp(_forward_with_ordered_gradients, _ordered_gradients)
