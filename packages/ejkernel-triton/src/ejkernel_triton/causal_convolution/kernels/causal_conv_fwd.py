"""The short causal convolution: both kernels move every element once and are bound by HBM.

    tokens        t0-3 t0-2 t0-1 | t0 t0+1 ...  block ... | +1 +2 +3
    forward    x  halo           | rows of the block      |               each row is loaded once into registers
    backward   x  carried        | rows of the block      |               to recompute the sums, for the activation
               dy                | rows of the block      |
               ds carried        | computed from the two  |               gradients of the sums
               dx written        | but the last W - 1     |               dx_t needs ds of the W - 1 tokens after it

A program has one tile of channels and a block of tokens, in the backward pass several blocks in a row. A thread has a
few neighbouring channels, so that its loads are wide, and all W taps of a token are registers of that thread. Halos of
the forward pass come from L1 or L2, since the neighbouring program reads them too. A program of the backward pass scans
over its blocks: it carries the last W - 1 rows of x and of ds, so that nothing is read or computed twice, and the rows
of the next blocks are in flight meanwhile. Only after its last block it computes W - 1 rows of ds that another program
also computes.

For packed sequences, `sequence_starts` holds the first token of each token's sequence, and T for padding tokens: a tap
counts if it is not before that token. A program of the backward kernel adds up the gradients of the weights over its
tokens, and XLA adds up the programs in a fixed order: without atomics, results are reproducible bit for bit.

Source: the short convolution of H3 (Fu et al. 2022, arXiv:2212.14052) and of Mamba (Gu & Dao 2023, arXiv:2312.00752).
"""

import triton
import triton.language as tl

from ejkernel_triton.causal_convolution.kernels.tile import (
    load_bias,
    load_sequence_start,
    load_weights,
    load_x_values,
    locate_program,
    mask_tap,
    row_load_offsets,
    sigmoid,
)


@triton.jit
def causal_conv_fwd_kernel(
    x, weight, bias, initial_tokens, sequence_starts, output, spec: tl.constexpr, per: tl.constexpr
):
    """Computes the activated sums of a block of tokens."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    row, block, tile = locate_program(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    x = x + (row // per.X) * (spec.T * spec.C)
    output = output + row * (spec.T * spec.C)
    if spec.HAS_INITIAL_STATE:
        initial_tokens = initial_tokens + (row // per.INITIAL_TOKENS) * ((W - 1) * spec.C)
    if spec.IS_PACKED:
        sequence_starts = sequence_starts + (row // per.SEQUENCE_STARTS) * spec.T
    # The W weights and the bias of each channel stay in registers for all tokens of the program.
    weights = load_weights(weight + (row // per.WEIGHT) * (W * spec.C), channels, spec)
    if spec.HAS_BIAS:
        bias = bias + (row // per.BIAS) * spec.C
    bias_values = load_bias(bias, channels, spec)
    token = block * BLOCK_T
    x_values = load_x_values(x, initial_tokens, token, channels, row_load_offsets(tile, spec), BLOCK_T + W - 1, spec)
    outputs = ()
    for i in tl.static_range(BLOCK_T):
        start = load_sequence_start(sequence_starts, token + i, spec)
        p = bias_values
        for k in tl.static_range(W):
            p += weights[k] * mask_tap(x_values[i + W - 1 - k], token + i, start, k, spec)
        if spec.APPLY_SILU:
            p = p * sigmoid(p, spec)
        # Padding tokens have start T and an output of 0.
        if spec.IS_PACKED:
            p = tl.where(token + i >= start, p, 0.0)
        outputs += (p,)
    # Stored after the arithmetic of the whole block, so that loads and stores do not alternate.
    at = output + tl.cast(token, tl.int64) * spec.C
    for i in tl.static_range(BLOCK_T):
        mask = (channels < spec.C) & (token + i + 0 * channels < spec.T)
        tl.store(at + (i * spec.C + channels), outputs[i].to(output.dtype.element_ty), mask=mask)
