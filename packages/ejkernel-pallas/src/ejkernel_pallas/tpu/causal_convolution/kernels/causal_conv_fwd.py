"""The forward kernel: blocks of a row in order, the last tokens of each in VMEM for the next.

HBM   x      ── double buffer ──►  block t               [block_t, block_c]
VMEM  tokens                       8 rows of block t - 1 | block t in float32
                                   sum over k of weight_k * tokens[8 - k : 8 - k + block_t]
HBM   output ◄─ double buffer ──   activation of the sums
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.causal_convolution.kernels.tile import (
    HALO_TOKENS,
    ConvolutionRefs,
    apply_activation,
    block_strips,
    convolve_strip,
    has_padding,
    load_tokens,
    zero_padding,
)
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec


def causal_conv_fwd(refs: ConvolutionRefs, *, spec: ConvolutionSpec) -> None:
    """Computes one block of the output."""
    block, size = pl.program_id(2), spec.block_t

    @pl.when(block == 0)
    def _() -> None:
        refs.tokens_with_halo[:, :HALO_TOKENS] = jnp.zeros_like(refs.tokens_with_halo[:, :HALO_TOKENS])

    @pl.when(block > 0)
    def _() -> None:
        refs.tokens_with_halo[:, :HALO_TOKENS] = refs.tokens_with_halo[:, size:]

    load_tokens(refs, spec)
    for strip in block_strips(spec):
        output = apply_activation(spec, convolve_strip(refs, spec, strip))
        refs.output[strip.row_slice, strip.lane_slice] = output.astype(refs.output.dtype)
    if spec.is_packed:

        @pl.when(has_padding(refs, spec, block))
        def _() -> None:
            zero_padding(refs, spec, block, refs.output, 0)
