"""The causal convolution in XLA: W shifted views of x, summed in one loop."""

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import (
    CausalConvolution,
    accumulator,
    activate,
    states,
    token_sequences_and_positions,
)
from ejkernel.families.causal_convolution.final_states import final_states, output_contributions_of_states
from ejkernel.families.causal_convolution.slot_states import forward_with_slot_states
from ejkernel.planning.fixed_tiles import map_tiles
from ejkernel_xla.fixed_tiles import RowOrder


@forward_with_slot_states
def forward(record: CausalConvolution, config: RowOrder) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Whether tokens are computed in tiles of fixed sizes.

    Returns:
        Output [B, T, C] and final states, both in x's dtype, or the slots. There are no residuals.
    """
    output = _output_in_tiles(record) if config.batch_invariant else activated_output(record)
    return (output, final_states(record)), ()


def _output_in_tiles(record: CausalConvolution) -> jax.Array:
    """Returns the activated sums, [B, T, C]: the window of each token is gathered, and tiles of windows are summed."""
    dtype, width = accumulator(record), record.weight.shape[1]
    weight, bias = record.weight.astype(dtype), record.bias
    windows = _windows(record)

    def tile(arrays: dict[str, jax.Array]) -> jax.Array:
        window = arrays["windows"].astype(dtype)
        sums = jnp.zeros((window.shape[0], window.shape[2]), dtype)
        for k in range(width):
            sums = sums + weight[:, width - 1 - k] * window[:, k]
        return activate(record, sums if bias is None else sums + bias.astype(dtype)).astype(record.x.dtype)

    output = map_tiles(tile, {"windows": windows.reshape(-1, *windows.shape[2:])}).reshape(record.x.shape)
    if record.cu_seqlens is None:
        return output
    return jnp.where((token_sequences_and_positions(record)[0] >= 0)[..., None], output, 0)


def _windows(record: CausalConvolution) -> jax.Array:
    """Returns each token and the W - 1 before it, newest first, [B, T, W, C] in x's dtype."""
    width, tokens = record.weight.shape[1], record.x.shape[1]
    sequence, position = token_sequences_and_positions(record)
    before = jnp.swapaxes(states(record), 1, 2)  # [B or N, W - 1, C]
    index = jnp.maximum(sequence, 0)
    views = []
    for k in range(width):
        view = jnp.pad(record.x, ((0, 0), (k, 0), (0, 0)))[:, :tokens]
        if k:
            # Token t - k is before the sequence: entry W - 1 - k + position of its state.
            state = before[index, jnp.clip(width - 1 - k + position, 0, width - 2)]
            view = jnp.where((position >= k)[..., None], view, state)
        views.append(view)
    return jnp.stack(views, axis=2)


def activated_output(record: CausalConvolution) -> jax.Array:
    """Returns the activated sums, [B, T, C]."""
    dtype, width = accumulator(record), record.weight.shape[1]
    weight, tokens = record.weight.astype(dtype), record.x.shape[1]
    sequence, position = token_sequences_and_positions(record)
    if record.cu_seqlens is None:
        longer = jnp.concatenate([jnp.swapaxes(states(record), 1, 2), record.x], axis=1)
    else:
        # The gradient of a token of no sequence is 0, and its derivative must be none of NaN.
        real = jnp.where((sequence >= 0)[..., None], record.x, 0)
        longer = jnp.pad(real, ((0, 0), (width - 1, 0), (0, 0)))
    # W is small: XLA fuses the shifted views into one loop over x.
    sums = jnp.zeros(record.x.shape, dtype)
    for k in range(width):
        back = longer[:, width - 1 - k : width - 1 - k + tokens].astype(dtype)
        if record.cu_seqlens is not None:
            back = jnp.where((position >= k)[..., None], back, 0)
        sums = sums + weight[:, width - 1 - k] * back
    # States reach the first W - 1 tokens of each sequence: a few rows, added where they belong.
    if record.sequence_state is not None and width > 1:
        token, rows = output_contributions_of_states(record)
        sums = sums.at[0, token].add(rows, mode="drop")
    if record.bias is not None:
        sums = sums + record.bias.astype(dtype)
    output = activate(record, sums).astype(record.x.dtype)
    return output if record.cu_seqlens is None else jnp.where((sequence >= 0)[..., None], output, 0)
