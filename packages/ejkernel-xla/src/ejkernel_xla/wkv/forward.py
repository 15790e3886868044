"""Forward pass of RWKV-4's weighted average: a scan over tokens, all rows and channels at the same time."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.wkv import FAMILY, WKV, State, accumulator, first_state, state_after_token
from ejkernel.planning.fixed_tiles import scan_fixed
from ejkernel_xla.fixed_tiles import forward_in_tiles
from ejkernel_xla.wkv.config import TokenLoop


def forward(record: WKV, config: TokenLoop) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final state of a record.

    Args:
        record: The canonical arguments.
        config: Tokens per iteration.

    Returns:
        Output [B, T, C] in the value's dtype and the state [B, 3, C] in the accumulator's. There are no residuals: the
        backward pass scans the tokens again.
    """
    if config.batch_invariant:
        return forward_in_tiles(lambda row: _forward(row, config), record, FAMILY.axes_of(record), "b", block=1), ()
    return _forward(record, config), ()


def _forward(record: WKV, config: TokenLoop) -> tuple[jax.Array, jax.Array]:
    parameters = (record.decay, record.bonus)
    output, state = scan_tokens(parameters, (record.key, record.value), first_state(record), record, config)
    return output, jnp.stack(state, axis=1)


def scan_tokens(
    parameters: tuple[jax.Array, jax.Array],
    tokens: tuple[jax.Array, jax.Array],
    state: State,
    record: WKV,
    config: TokenLoop,
) -> tuple[jax.Array, State]:
    """Returns outputs [B, T, C] and the state after the last token; differentiable in the first three arguments.

    The gradient keeps the states before each token, three numbers per token and channel, and recomputes the rest.
    """
    dtype = accumulator(record)
    decay, bonus = (x.astype(dtype) for x in parameters)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # in a scan, nothing could be merged
    def token(state: State, token: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
        key, value = (x.astype(dtype) for x in token)
        state, output = state_after_token((decay, bonus), state, (key, value))
        return state, output.astype(record.value.dtype)

    time_major = functools.partial(jnp.moveaxis, source=1, destination=0)
    arrays = tuple(time_major(x) for x in tokens)
    if config.batch_invariant:
        state, outputs = scan_fixed(token, state, arrays, record.key.shape[1])
    else:
        state, outputs = lax.scan(token, state, arrays, unroll=config.unroll)
    return jnp.moveaxis(outputs, 0, 1), state
