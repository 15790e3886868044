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
    convolve_strip,
    has_padding,
    load_tokens,
    strips,
    zero_padding,
)
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop


def causal_conv_bwd(refs: ConvolutionRefs, *, spec: ConvolutionSpec) -> None:
    """Computes one block of dx, and adds what it adds to the gradients of the weights."""
    block = spec.blocks - 1 - pl.program_id(2)
    _load_block(refs, spec, block)
    for strip in strips(spec):
        cotangent = refs.cotangent[strip.rows, strip.lanes].astype(jnp.float32)
        if spec.silu:
            cotangent = cotangent * activation_derivative(spec, convolve_strip(refs, spec, strip))
        refs.sums[strip.group, strip.rows] = cotangent
    if spec.packed or spec.tail < spec.block_t:

        @pl.when(has_padding(refs, spec, block))
        def _() -> None:
            zero_padding(refs, spec, block, refs.sums, 0)

    _zero_gradients_of_first_tokens(refs, spec, block)
    for strip in strips(spec):
        _store_strip_gradients(refs, spec, strip)


def _load_block(refs: ConvolutionRefs, spec: ConvolutionSpec, block: jax.Array) -> None:
    """Loads the tokens of a block and what other blocks have for it."""

    @pl.when(block == spec.blocks - 1)
    def _() -> None:
        refs.sums[:, spec.block_t :] = jnp.zeros_like(refs.sums[:, spec.block_t :])
        refs.dweights[...] = jnp.zeros_like(refs.dweights)

    @pl.when(block < spec.blocks - 1)
    def _() -> None:
        refs.sums[:, spec.block_t :] = refs.sums[:, :HALO_TOKENS]

    for group in range(refs.tokens.shape[0]):
        before = refs.before[:, Strip(group, 0, 0).lanes].astype(jnp.float32)[HALO_TOKENS:]
        refs.tokens[group, :HALO_TOKENS] = jnp.where(block > 0, before, 0.0)
    load_tokens(refs, spec)
    if spec.packed or spec.tail < spec.block_t:

        @pl.when(has_padding(refs, spec, block))
        def _() -> None:
            zero_padding(refs, spec, block, refs.tokens, HALO_TOKENS)


def _zero_gradients_of_first_tokens(refs: ConvolutionRefs, spec: ConvolutionSpec, block: jax.Array) -> None:
    """Zeros the gradients of first tokens, which are computed outside of the kernel."""
    first, zero_sums = spec.width - 1, jnp.zeros_like(refs.sums[:, :1])
    if spec.packed:

        def zero(sequence: jax.Array, carry: jax.Array) -> jax.Array:
            for token in range(first):
                row = refs.bounds[sequence] + token - block * spec.block_t

                @pl.when((row >= 0) & (row < spec.block_t))
                def _(row: jax.Array = row) -> None:
                    refs.sums[:, pl.ds(row, 1)] = zero_sums

            return carry

        fori_loop(refs.starts[block], refs.starts[spec.blocks + block], zero, jnp.int32(0))
    elif spec.separate_first:

        @pl.when(block == 0)
        def _() -> None:
            for token in range(first):
                refs.sums[:, token : token + 1] = zero_sums


def _store_strip_gradients(refs: ConvolutionRefs, spec: ConvolutionSpec, strip: Strip) -> None:
    """Stores dx of a strip, and adds its sums to the gradients of the weights and the bias."""
    sums = refs.sums[strip.group, strip.rows]
    dx = refs.weights[0:1, strip.lanes] * sums
    for k in range(1, spec.width):
        after = refs.sums[strip.group, strip.at + k : strip.at + k + strip.size]
        dx = dx + refs.weights[k : k + 1, strip.lanes] * after
    refs.dx[strip.rows, strip.lanes] = dx.astype(refs.dx.dtype)
    for k in range(spec.width + 1):
        begin = HALO_TOKENS + strip.at - k
        last = k == spec.width  # the bias
        product = sums if last else sums * refs.tokens[strip.group, begin : begin + strip.size]
        # Rows of a register stay apart: eight sums, which XLA adds up.
        part = jnp.sum(lax.reshape(product, (strip.size // 8, 8, product.shape[1])), axis=0)
        refs.dweights[8 * k : 8 * k + 8, strip.lanes] += part
