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
"""Tokens before a block, or after it, of which W - 1 are used: the rows of one vector register of float32."""
STRIP_TOKENS = 128
"""Tokens of 128 channels that are computed together: as many as registers hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionRefs:
    """Refs of both kernels; a field that is None is not needed.

    Attributes:
        sequence_bounds: int32 [N + 1] of `plan.scalar_tables`, in scalar memory.
        first_token_sequence_ranges: int32 [2 * blocks] of `plan.scalar_tables`, in scalar memory.
        x: [block_t, block_c], the inputs.
        weights: float32 [W + 1, block_c]; the last row is the bias.
        x_before_block: [16, block_c], the inputs before the block.
        cotangent: [block_t, block_c], the cotangent of the output.
        output: [block_t, block_c].
        dx: [block_t, block_c].
        dweights: float32 [(W + 1) * 8, block_c], sums over a row's tokens: eight partial sums per weight.
        tokens_with_halo: Scratch, float32 [block_c / 128, 8 + block_t, 128]: the eight tokens before the block, and its
            own. Rows of one register follow each other in memory, so a load from any row is one instruction.
        convolution_sum_cotangents: Scratch, float32 [block_c / 128, block_t + 8, 128]: cotangents of the block's sums,
            and of the first eight sums of the following block.
    """

    sequence_bounds: Ref
    first_token_sequence_ranges: Ref
    x: Ref
    weights: Ref
    tokens_with_halo: Ref
    x_before_block: Ref = None
    cotangent: Ref = None
    output: Ref = None
    dx: Ref = None
    dweights: Ref = None
    convolution_sum_cotangents: Ref = None


@dataclasses.dataclass(frozen=True)
class Strip:
    """Some tokens of 128 channels of a block.

    Attributes:
        lane_group: Index of the group of 128 channels.
        first_token: Index of the first token in the block.
        num_tokens: The number of tokens.
    """

    lane_group: int
    first_token: int
    num_tokens: int

    @property
    def lane_slice(self) -> slice:
        """Returns the range of the strip's channels."""
        return slice(LANES * self.lane_group, LANES * (self.lane_group + 1))

    @property
    def row_slice(self) -> slice:
        """Returns the range of the strip's tokens."""
        return slice(self.first_token, self.first_token + self.num_tokens)


def block_strips(spec: ConvolutionSpec) -> list[Strip]:
    """Returns all strips of a block."""
    return [
        Strip(group, at, min(STRIP_TOKENS, spec.block_t - at))
        for group in range(spec.block_c // LANES)
        for at in range(0, spec.block_t, STRIP_TOKENS)
    ]


def load_tokens(refs: ConvolutionRefs, spec: ConvolutionSpec) -> None:
    """Converts a block of x into scratch memory."""
    for strip in block_strips(spec):
        x = refs.x[strip.row_slice, strip.lane_slice].astype(jnp.float32)
        refs.tokens_with_halo[
            strip.lane_group, HALO_TOKENS + strip.first_token : HALO_TOKENS + strip.first_token + strip.num_tokens
        ] = x


def convolve_strip(refs: ConvolutionRefs, spec: ConvolutionSpec, strip: Strip) -> jax.Array:
    """Returns the sums before the activation for the tokens of a strip, float32; half of each sum if
    `spec.halves_convolution_sums`.
    """

    def weighted_tokens_before(k: int) -> jax.Array:
        begin = HALO_TOKENS + strip.first_token - k
        return (
            refs.weights[k : k + 1, strip.lane_slice]
            * refs.tokens_with_halo[strip.lane_group, begin : begin + strip.num_tokens]
        )

    total = weighted_tokens_before(0) + refs.weights[spec.filter_width : spec.filter_width + 1, strip.lane_slice]
    for k in range(1, spec.filter_width):
        total = total + weighted_tokens_before(k)
    return total


def apply_activation(spec: ConvolutionSpec, convolution_sums: jax.Array) -> jax.Array:
    """Returns the activation of the sums; `convolution_sums` is half of each if
    `spec.halves_convolution_sums`.
    """
    if not spec.has_silu:
        return convolution_sums
    # sigmoid(p) = (1 + tanh(p / 2)) / 2
    return (
        convolution_sums + convolution_sums * jnp.tanh(convolution_sums)
        if spec.halves_convolution_sums
        else jax.nn.silu(convolution_sums)
    )


def activation_derivative(spec: ConvolutionSpec, convolution_sums: jax.Array) -> jax.Array:
    """Returns the derivative of the activation at `convolution_sums`. If `convolution_sums` is half of the sum, the
    result is twice the derivative at the sum.
    """
    if spec.halves_convolution_sums:
        tangent = jnp.tanh(convolution_sums)
        return (1.0 + tangent) * (1.0 + convolution_sums * (1.0 - tangent))
    sigmoid = jax.nn.sigmoid(convolution_sums)
    return sigmoid * (1.0 + convolution_sums * (1.0 - sigmoid))


def has_padding(refs: ConvolutionRefs, spec: ConvolutionSpec, block: Any) -> Any:
    """Returns whether a block has padding tokens: tokens outside the row, or tokens that belong to no sequence."""
    begin, last = block * spec.block_t, refs.sequence_bounds.shape[0] - 1
    return (begin < refs.sequence_bounds[0]) | (begin + spec.block_t > refs.sequence_bounds[last])


def zero_padding(refs: ConvolutionRefs, spec: ConvolutionSpec, block: Any, x: Ref, first_block_row: int) -> None:
    """Zeros the rows of padding tokens, next to last axis, in an array whose row `first_block_row` is the block's
    first.
    """
    begin, last = block * spec.block_t - first_block_row, refs.sequence_bounds.shape[0] - 1
    # `where` instead of a product with 0, because padding may hold NaN.
    token = begin + lax.broadcasted_iota(jnp.int32, x.shape, len(x.shape) - 2)
    is_real = (token >= refs.sequence_bounds[0]) & (token < refs.sequence_bounds[last])
    x[...] = jnp.where(is_real, x[...].astype(jnp.float32), 0.0).astype(x.dtype)
