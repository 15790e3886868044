"""The causal convolution family: the record its operations lower to and its meaning.

Every channel c is convolved along time with W weights of its own, the last of which meets the token itself:

    p_tc = bias_c + sum over k < W of weight_{c, W - 1 - k} * x_{t - k, c}        y = activation(p)

Tokens before the first of a sequence are those of its state, W - 1 tokens, the oldest first; zeros without one. The
state behind a sequence is its last W - 1 tokens, those of the state before among them. Sums are in float32 (float64 for
float64 x). Tokens of no sequence have output 0.

Source: the short convolution of H3 (Fu et al. 2022, arXiv:2212.14052) and of Mamba (Gu & Dao 2023, arXiv:2312.00752).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning import packing
from ejkernel.planning.requests import packed_requests


@arguments
class CausalConvolution:
    """Canonical input of one convolution. B rows, T tokens, C channels, W weights a channel, N packed sequences.

    Attributes:
        x: [B, T, C] floating.
        weight: [C, W] floating.
        bias: [C] floating; None adds nothing.
        initial_state: [B, C, W - 1] floating, the tokens before the first of every row; None is zeros.
        cu_seqlens: [N + 1] int, with B = 1: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]`, and sees no
            others.
        sequence_state: [N, C, W - 1] floating, with `cu_seqlens`: the tokens before the first of every sequence.
        activation: None, or `"silu"`.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None = None
    initial_state: jax.Array | None = None
    cu_seqlens: jax.Array | None = None
    sequence_state: jax.Array | None = None
    activation: str | None = static(None)


def accumulator(record: CausalConvolution) -> Any:
    """The dtype of sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def states(record: CausalConvolution) -> jax.Array:
    """The tokens before the first ones, [B, C, W - 1], or [N, C, W - 1] of packed sequences, in x's dtype."""
    given = record.initial_state if record.cu_seqlens is None else record.sequence_state
    if given is not None:
        return given.astype(record.x.dtype)
    rows = record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return jnp.zeros((rows, record.x.shape[2], record.weight.shape[1] - 1), record.x.dtype)


def places(record: CausalConvolution) -> tuple[jax.Array, jax.Array]:
    """Sequence (a row is one; -1 for none) and position in it of every token, int32 [B, T]."""
    rows, tokens, _ = record.x.shape
    if record.cu_seqlens is not None:
        return packing.packed_ids(record.cu_seqlens, tokens)
    row, token = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(tokens, dtype=jnp.int32)
    return jnp.broadcast_to(row, (rows, tokens)), jnp.broadcast_to(token, (rows, tokens))


def activate(record: CausalConvolution, p: jax.Array) -> jax.Array:
    """The activation of sums."""
    return jax.nn.silu(p) if record.activation == "silu" else p


def reference(record: CausalConvolution) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """The family's meaning, every token looked up where it is; float64 if x is, else float32.

    Returns:
        Output [B, T, C] and final states [B, C, W - 1], or [N, C, W - 1], both in x's dtype. There are no residuals.
    """
    dtype, width = accumulator(record), record.weight.shape[1]
    sequence, before = places(record)[0], states(record)
    sums = jnp.zeros(record.x.shape, dtype)
    for k in range(width):
        sums = sums + record.weight[:, width - 1 - k].astype(dtype) * _back(record, before, k).astype(dtype)
    if record.bias is not None:
        sums = sums + record.bias.astype(dtype)
    output = jnp.where((sequence >= 0)[..., None], activate(record, sums), 0)
    return (output.astype(record.x.dtype), _behind(record, before)), ()


def _back(record: CausalConvolution, before: jax.Array, k: int) -> jax.Array:
    """For every token the one k before it, [B, T, C]."""
    (sequence, position), width = places(record), record.weight.shape[1]
    shifted = jnp.pad(record.x, ((0, 0), (k, 0), (0, 0)))[:, : record.x.shape[1]]
    if width == 1 or k == 0:
        return shifted
    slot = jnp.clip(width - 1 + position - k, 0, width - 2)
    return jnp.where((position >= k)[..., None], shifted, before[jnp.maximum(sequence, 0), :, slot])


def _behind(record: CausalConvolution, before: jax.Array) -> jax.Array:
    """The last W - 1 tokens of every sequence, [B, C, W - 1] or [N, C, W - 1]."""
    held, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    if record.cu_seqlens is None:
        return jnp.concatenate([before, jnp.swapaxes(record.x, 1, 2)], axis=2)[:, :, tokens : tokens + held]
    slot, bounds = jnp.arange(held, dtype=jnp.int32), jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
    length = jnp.diff(bounds)[:, None]
    at = jnp.clip(bounds[1:, None] - held + slot, 0, tokens - 1)
    kept = jnp.take_along_axis(before, jnp.clip(slot + length, 0, max(0, held - 1))[:, None], axis=2)
    inside = (slot + length >= held)[:, None]
    return jnp.where(inside, jnp.swapaxes(record.x[0, at], 1, 2), kept)


def localise(record: CausalConvolution, offsets: Mapping[str, jax.Array]) -> CausalConvolution:
    """One shard's record as it is: rows and channels know nothing of each other."""
    return record


def requests(record: CausalConvolution) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: packed sequences, or the rows."""
    if record.cu_seqlens is None:
        return ({"b": np.arange(record.x.shape[0])},)
    return (packed_requests(record.cu_seqlens, record.x.shape[1]),)


FAMILY = Family(
    name="causal_convolution",
    record=CausalConvolution,
    differentiable=("x", "weight", "bias", "initial_state", "sequence_state"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.weight.shape[1],),
    axes={
        "x": "b t i",
        "weight": "i w",
        "bias": "i",
        "initial_state": "b i s",
        "cu_seqlens": "n",
        "sequence_state": "r i s",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        "output": ("b t i", "b i s"),
    },
    shardable="bi",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
