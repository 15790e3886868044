"""The shared code of the causal convolution's kernels: their refs, sums of a strip of tokens, and padding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES

HALO_TOKENS = 8
"""Rows before a block, or after it, of which W - 1 are used: one vector register of float32."""
STRIP_CHANNELS = 128
"""Tokens that are computed together: what registers hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionRefs:
    """Refs of both kernels; a field that is None is not needed.

    Attributes:
        bounds: int32 [N + 1] of `plan.scalar_tables`, in scalar memory.
        starts: int32 [2 * blocks] of `plan.scalar_tables`, in scalar memory.
        x: [block_t, block_c].
        weights: float32 [W + 1, block_c]; the last row is the bias.
        before: [16, block_c], the tokens before the block.
        cotangent: [block_t, block_c], of the output.
        output: [block_t, block_c].
        dx: [block_t, block_c].
        dweights: float32 [(W + 1) * 8, block_c], sums over a row's tokens; eight rows each, to be added.
        tokens: Scratch, float32 [block_c / 128, 8 + block_t, 128]: x after the tokens before it. Rows of one register
            lie one after another, so a load from any row is one instruction.
        sums: Scratch, float32 [block_c / 128, block_t + 8, 128]: cotangents of the sums, before those of the block
            after.
    """

    bounds: Ref
    starts: Ref
    x: Ref
    weights: Ref
    tokens: Ref
    before: Ref = None
    cotangent: Ref = None
    output: Ref = None
    dx: Ref = None
    dweights: Ref = None
    sums: Ref = None


@dataclasses.dataclass(frozen=True)
class Strip:
    """Some tokens of 128 channels of a block.

    Attributes:
        group: Index of the group of 128 channels.
        at: The first token.
        size: How many.
    """

    group: int
    at: int
    size: int

    @property
    def lanes(self) -> slice:
        """Returns the range of the strip's channels."""
        return slice(LANES * self.group, LANES * (self.group + 1))

    @property
    def rows(self) -> slice:
        """Returns the range of the strip's tokens."""
        return slice(self.at, self.at + self.size)


def strips(spec: ConvolutionSpec) -> list[Strip]:
    """Returns all strips of a block."""
    return [
        Strip(group, at, min(STRIP_CHANNELS, spec.block_t - at))
        for group in range(spec.block_c // LANES)
        for at in range(0, spec.block_t, STRIP_CHANNELS)
    ]


def load_tokens(refs: ConvolutionRefs, spec: ConvolutionSpec) -> None:
    """Converts a block of x into scratch memory."""
    for strip in strips(spec):
        x = refs.x[strip.rows, strip.lanes].astype(jnp.float32)
        refs.tokens[strip.group, HALO_TOKENS + strip.at : HALO_TOKENS + strip.at + strip.size] = x


def convolve_strip(refs: ConvolutionRefs, spec: ConvolutionSpec, strip: Strip) -> jax.Array:
    """Returns the sums before the activation for the tokens of a strip, float32; half of each sum if
    `spec.halves_sums`.
    """

    def tokens_before(k: int) -> jax.Array:
        begin = HALO_TOKENS + strip.at - k
        return refs.weights[k : k + 1, strip.lanes] * refs.tokens[strip.group, begin : begin + strip.size]

    total = tokens_before(0) + refs.weights[spec.width : spec.width + 1, strip.lanes]
    for k in range(1, spec.width):
        total = total + tokens_before(k)
    return total


def apply_activation(spec: ConvolutionSpec, sums: jax.Array) -> jax.Array:
    """Returns the activation of the sums; `sums` holds half of each sum if `spec.halves_sums`."""
    if not spec.silu:
        return sums
    # sigmoid(p) = (1 + tanh(p / 2)) / 2
    return sums + sums * jnp.tanh(sums) if spec.halves_sums else jax.nn.silu(sums)


def activation_derivative(spec: ConvolutionSpec, sums: jax.Array) -> jax.Array:
    """Returns the derivative of the activation at `sums`. If `sums` is half of the sum, the result is twice the
    derivative at the sum.
    """
    if spec.halves_sums:
        tangent = jnp.tanh(sums)
        return (1.0 + tangent) * (1.0 + sums * (1.0 - tangent))
    sigmoid = jax.nn.sigmoid(sums)
    return sigmoid * (1.0 + sums * (1.0 - sigmoid))


def has_padding(refs: ConvolutionRefs, spec: ConvolutionSpec, block: Any) -> Any:
    """Returns whether a block has padding tokens: tokens outside the row, or tokens that belong to no sequence."""
    begin, last = block * spec.block_t, refs.bounds.shape[0] - 1
    return (begin < refs.bounds[0]) | (begin + spec.block_t > refs.bounds[last])


def zero_padding(refs: ConvolutionRefs, spec: ConvolutionSpec, block: Any, x: Ref, offset: int) -> None:
    """Zeros the rows of padding tokens, next to last axis, in an array whose row `offset` is the block's first."""
    begin, last = block * spec.block_t - offset, refs.bounds.shape[0] - 1
    # `where` instead of a product with 0, because padding may hold NaN.
    token = begin + lax.broadcasted_iota(jnp.int32, x.shape, len(x.shape) - 2)
    is_real = (token >= refs.bounds[0]) & (token < refs.bounds[last])
    x[...] = jnp.where(is_real, x[...].astype(jnp.float32), 0.0).astype(x.dtype)
