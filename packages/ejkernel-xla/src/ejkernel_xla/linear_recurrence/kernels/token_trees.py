"""Trees of draft tokens: one token of every request at a time, each from the state after its parent.

    step n, token n of all requests:    states after parents [N, H, K, V] -> gates, write, read -> states after it

The states after all tokens are the output, so memory holds each of them once. The backward pass goes over the tokens in
reverse, and adds what a token's state has to the gradient of its parent's.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence import TOKEN_FIELDS, LinearRecurrence, accumulator, num_state_heads, states
from ejkernel.planning.trees import TokenTrees, token_trees
from ejkernel.types.pullback import Pullback
from ejkernel_xla.linear_recurrence.kernels.chunk import ChunkTokens, advance, precision

TokenFields = dict[str, jax.Array]


class TreeStep(NamedTuple):
    """One token of every request.

    Attributes:
        token: [N] its index among the tokens of all rows; 0 where the request has fewer tokens.
        valid: [N] bool, whether the request has the token.
        parent: [N] the index of its parent, 0 where that is the request's state.
        is_root: [N] bool, whether its parent is the request's state.
    """

    token: jax.Array
    valid: jax.Array
    parent: jax.Array
    is_root: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordTrees:
    """The trees of a record.

    Attributes:
        trees: Parents and requests of the tokens of all rows.
        tokens: Tokens per row.
        steps: Tokens of the longest request; traced for packed sequences.
    """

    trees: TokenTrees
    tokens: int
    steps: Any

    def step(self, n: jax.Array) -> TreeStep:
        """Returns token n of every request."""
        valid = n < self.trees.lengths
        token = jnp.where(valid, self.trees.starts + n, 0)
        parent = self.trees.parents[token]
        return TreeStep(token, valid, jnp.maximum(parent, 0), parent < 0)


def tree_forward(record: LinearRecurrence) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, H, V] and the states after all tokens [B, T, H, K, V] of a record with plain
    states.
    """
    trees, first = _make_trees(record), states(record)
    rows, tokens = record.query.shape[:2]
    count = rows * tokens
    every = jnp.zeros((count, *first.shape[1:]), first.dtype)
    output = jnp.zeros((count, first.shape[1], first.shape[3]), record.query.dtype)

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        every, output = carry
        at = trees.step(n)
        after, read = _run_tokens(record, _states_before(every, first, at), _load_tokens(record, at, tokens))
        target = jnp.where(at.valid, at.token, count)  # after the last token: dropped
        output = output.at[target].set(read.astype(output.dtype), mode="drop")
        return every.at[target].set(after, mode="drop"), output

    every, output = lax.fori_loop(0, trees.steps, step, (every, output))
    return output.reshape(rows, tokens, *output.shape[1:]), every.reshape(rows, tokens, *every.shape[1:])


def tree_backward(pullback: Pullback) -> TokenFields:
    """Returns the gradients of a record with trees and plain states, of all token fields that are asked for and of the
    initial states.
    """
    record, (doutput, dfinal) = pullback.record, pullback.cotangent
    trees, first, tokens = _make_trees(record), states(record), record.query.shape[1]
    every = tree_forward(record)[1].reshape(-1, *first.shape[1:])
    devery, dfirst = jnp.zeros_like(every), jnp.zeros_like(first)
    if record.keeps_token_states:
        devery = dfinal.reshape(every.shape).astype(every.dtype)
    else:
        dfirst = dfinal.astype(first.dtype)
    doutput = doutput.reshape(-1, *doutput.shape[2:]).astype(every.dtype)
    names = [name for name in TOKEN_FIELDS if name in pullback.grad_fields]
    grads = {name: jnp.zeros(getattr(record, name).shape, accumulator(record)) for name in names}

    def step(n: jax.Array, carry: tuple[TokenFields, jax.Array, jax.Array]) -> tuple[TokenFields, jax.Array, jax.Array]:
        grads, devery, dfirst = carry
        at = trees.step(trees.steps - 1 - n)
        _, pull = jax.vjp(
            lambda state, fields: _run_tokens(record, state, fields),
            _states_before(every, first, at),
            _load_tokens(record, at, tokens),
        )
        dbefore, dfields = pull((devery[at.token], doutput[at.token]))
        grads = {name: _add_gradient(grads[name], dfields[name], at, tokens) for name in names}
        dfirst = dfirst + _zero_unless(at.valid & at.is_root, dbefore)
        return grads, devery.at[at.parent].add(_zero_unless(at.valid & ~at.is_root, dbefore)), dfirst

    grads, _, dfirst = lax.fori_loop(0, trees.steps, step, (grads, devery, dfirst))
    return {**grads, "initial_state": dfirst, "sequence_state": dfirst}


def _make_trees(record: LinearRecurrence) -> RecordTrees:
    if record.parents is None:
        raise ValueError("parents: got None, wants the tree of every row or sequence")
    trees, tokens = token_trees(record.parents, record.cu_seqlens), record.query.shape[1]
    return RecordTrees(
        trees=trees, tokens=tokens, steps=tokens if record.cu_seqlens is None else jnp.max(trees.lengths, initial=0)
    )


def _states_before(all_states: jax.Array, first: jax.Array, at: TreeStep) -> jax.Array:
    """Returns the states that the tokens of a step continue, [N, H, K, V]."""
    return jnp.where(at.is_root[:, None, None, None], first, all_states[at.parent])


def _run_tokens(record: LinearRecurrence, before: jax.Array, fields: TokenFields) -> tuple[jax.Array, jax.Array]:
    """Returns the states after one token of every request and their outputs [N, H, V], differentiable in all."""
    tokens: dict[str, Any] = {name: None for name in TOKEN_FIELDS}
    tokens |= {name: x.reshape(-1, 1, *x.shape[2:]) for name, x in fields.items()}
    table = before.reshape(-1, *before.shape[2:])
    read, after = advance(table, ChunkTokens(**tokens), record.softmax_scale, precision(record))
    return after.reshape(before.shape), read.reshape(-1, num_state_heads(record), read.shape[2])


def _load_tokens(record: LinearRecurrence, at: TreeStep, tokens: int) -> TokenFields:
    """Returns the fields of a step's tokens, [N, heads, ...] in the accumulator's dtype."""
    fields = {name: getattr(record, name) for name in TOKEN_FIELDS}
    return {
        name: x[_row_and_token(x, at, tokens)].astype(accumulator(record))
        for name, x in fields.items()
        if x is not None
    }


def _add_gradient(grad: jax.Array, dfield: jax.Array, at: TreeStep, tokens: int) -> jax.Array:
    """Returns the gradient of a field with that of a step's tokens added."""
    return grad.at[_row_and_token(grad, at, tokens)].add(_zero_unless(at.valid, dfield))


def _row_and_token(x: jax.Array, at: TreeStep, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the row and the token of a step's tokens in a field [B|1, T|1, ...]."""
    row, token = at.token // tokens, at.token % tokens
    return row if x.shape[0] > 1 else 0 * row, token if x.shape[1] > 1 else 0 * token


def _zero_unless(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x [N, ...] where a request's condition holds, and 0 elsewhere."""
    return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
