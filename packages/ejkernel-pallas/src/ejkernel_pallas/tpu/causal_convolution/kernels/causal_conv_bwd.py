"""The backward kernel: blocks of a row in reverse, the first gradients of each in VMEM for the block before it.

HBM   x, cotangent ─ double buffer ─► block t              [block_t, block_c], and 16 rows of x before it
VMEM  tokens                          8 rows of block t - 1 | block t in float32
      sums                            gradients of block t's sums | 8 rows of block t + 1
HBM   dx ◄─ double buffer ─           sum over k of weight_k * sums[k : k + block_t]
      dweights ◄─ once a row ─        sum over t of sums[t] * tokens[8 + t - k]
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.causal_convolution.kernels.tile import (
    HALO_TOKENS,
    ConvolutionRefs,
    Strip,
    activation_derivative,
    block_strips,
    convolve_strip,
    has_padding,
    load_tokens,
    zero_padding,
)
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop


def causal_conv_bwd(refs: ConvolutionRefs, *, spec: ConvolutionSpec) -> None:
    """Computes one block of dx, and adds what it adds to the gradients of the weights."""
    block = spec.blocks_per_row - 1 - pl.program_id(2)
    _load_block_and_halos(refs, spec, block)
    for strip in block_strips(spec):
        cotangent = refs.cotangent[strip.row_slice, strip.lane_slice].astype(jnp.float32)
        if spec.has_silu:
            cotangent = cotangent * activation_derivative(spec, convolve_strip(refs, spec, strip))
        refs.convolution_sum_cotangents[strip.lane_group, strip.row_slice] = cotangent
    if spec.is_packed or spec.tokens_in_last_block < spec.block_t:

        @pl.when(has_padding(refs, spec, block))
        def _() -> None:
            zero_padding(refs, spec, block, refs.convolution_sum_cotangents, 0)

    _zero_gradients_of_first_tokens(refs, spec, block)
    for strip in block_strips(spec):
        _store_strip_gradients(refs, spec, strip)


def _load_block_and_halos(refs: ConvolutionRefs, spec: ConvolutionSpec, block: jax.Array) -> None:
    """Loads the tokens of a block and what other blocks have for it."""

    @pl.when(block == spec.blocks_per_row - 1)
    def _() -> None:
        refs.convolution_sum_cotangents[:, spec.block_t :] = jnp.zeros_like(
            refs.convolution_sum_cotangents[:, spec.block_t :]
        )
        refs.dweights[...] = jnp.zeros_like(refs.dweights)

    @pl.when(block < spec.blocks_per_row - 1)
    def _() -> None:
        refs.convolution_sum_cotangents[:, spec.block_t :] = refs.convolution_sum_cotangents[:, :HALO_TOKENS]

    for group in range(refs.tokens_with_halo.shape[0]):
        before = refs.x_before_block[:, Strip(group, 0, 0).lane_slice].astype(jnp.float32)[HALO_TOKENS:]
        refs.tokens_with_halo[group, :HALO_TOKENS] = jnp.where(block > 0, before, 0.0)
    load_tokens(refs, spec)
    if spec.is_packed or spec.tokens_in_last_block < spec.block_t:

        @pl.when(has_padding(refs, spec, block))
        def _() -> None:
            zero_padding(refs, spec, block, refs.tokens_with_halo, HALO_TOKENS)


def _zero_gradients_of_first_tokens(refs: ConvolutionRefs, spec: ConvolutionSpec, block: jax.Array) -> None:
    """Zeros the gradients of first tokens, which are computed outside of the kernel."""
    first, zero_sums = spec.filter_width - 1, jnp.zeros_like(refs.convolution_sum_cotangents[:, :1])
    if spec.is_packed:

        def zero_sequence_start(sequence_index: jax.Array, carry: jax.Array) -> jax.Array:
            for token in range(first):
                row = refs.sequence_bounds[sequence_index] + token - block * spec.block_t

                @pl.when((row >= 0) & (row < spec.block_t))
                def _(row: jax.Array = row) -> None:
                    refs.convolution_sum_cotangents[:, pl.ds(row, 1)] = zero_sums

            return carry

        fori_loop(
            refs.first_token_sequence_ranges[block],
            refs.first_token_sequence_ranges[spec.blocks_per_row + block],
            zero_sequence_start,
            jnp.int32(0),
        )
    elif spec.computes_first_tokens_separately:

        @pl.when(block == 0)
        def _() -> None:
            for token in range(first):
                refs.convolution_sum_cotangents[:, token : token + 1] = zero_sums


def _store_strip_gradients(refs: ConvolutionRefs, spec: ConvolutionSpec, strip: Strip) -> None:
    """Stores dx of a strip, and adds its sums to the gradients of the weights and the bias."""
    sums = refs.convolution_sum_cotangents[strip.lane_group, strip.row_slice]
    dx = refs.weights[0:1, strip.lane_slice] * sums
    for k in range(1, spec.filter_width):
        after = refs.convolution_sum_cotangents[
            strip.lane_group, strip.first_token + k : strip.first_token + k + strip.num_tokens
        ]
        dx = dx + refs.weights[k : k + 1, strip.lane_slice] * after
    refs.dx[strip.row_slice, strip.lane_slice] = dx.astype(refs.dx.dtype)
    for k in range(spec.filter_width + 1):
        begin = HALO_TOKENS + strip.first_token - k
        last = k == spec.filter_width  # the bias
        product = sums if last else sums * refs.tokens_with_halo[strip.lane_group, begin : begin + strip.num_tokens]
        # Rows of a register stay apart: eight sums, which XLA adds up.
        part = jnp.sum(lax.reshape(product, (strip.num_tokens // 8, 8, product.shape[1])), axis=0)
        refs.dweights[8 * k : 8 * k + 8, strip.lane_slice] += part
