# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""What the backward kernels share: one tile pair's weights and the gradient of its scores."""

import triton
import triton.language as tl

from ejkernel_triton.tiled_attention.tile import (
    add_rows,
    allowed,
    drop,
    load_tile,
    powers,
    product_of_rows,
    transform,
)


@triton.jit
def load_queries(start, described, bases, spec: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A query tile: queries [Q, BD] and cotangents [Q, BV] as sides, and by row shift of scores, delta and argmax."""
    BD: tl.constexpr = spec.BD
    BV: tl.constexpr = spec.BV
    q_base, do_base, shift, delta, argmax = bases
    index, real, _, _, _ = described
    q = load_tile(q_base, start, real, spec.H * spec.D, spec.D, BLOCK, BD, MASKED)
    do = load_tile(do_base, start, real, spec.H * spec.DV, spec.DV, BLOCK, BV, MASKED)
    if MASKED:
        row_shift = tl.load(shift + index, mask=real, other=0.0)
        row_delta = tl.load(delta + index, mask=real, other=0.0)
    else:
        row_shift = tl.load(shift + index)
        row_delta = tl.load(delta + index)
    row_argmax = index
    if spec.NORMALIZE:
        pass
    else:
        row_argmax = tl.load(argmax + index, mask=real, other=0)
    q_side = (q, q_base, start, real, spec.H * spec.D)
    do_side = (do, do_base, start, real, spec.H * spec.DV)
    return q_side, do_side, row_shift, row_delta, row_argmax


@triton.jit
def query_bases(query, cotangent, shift, delta, argmax, batch, head, spec: tl.constexpr, per: tl.constexpr):
    """Where a head's queries begin in each of the arrays that `load_queries` reads."""
    q_base = query + (tl.cast(batch // per.QUERY, tl.int64) * spec.T * spec.H + head) * spec.D
    do_base = cotangent + (tl.cast(batch // per.COTANGENT, tl.int64) * spec.T * spec.H + head) * spec.DV
    shift += (tl.cast(batch // per.SHIFT, tl.int64) * spec.H + head) * spec.T
    delta += (tl.cast(batch // per.DELTA, tl.int64) * spec.H + head) * spec.T
    if spec.NORMALIZE:
        pass
    else:
        argmax += (tl.cast(batch // per.ARGMAX, tl.int64) * spec.H + head) * spec.T
    return q_base, do_base, shift, delta, argmax


@triton.jit
def weights_of(products, queries, keys, shift, bias, mask, spec: tl.constexpr, MASKED: tl.constexpr):
    """Softmax weights of a tile from its products, and the slope of the soft cap."""
    scores, slope = transform(products, queries, keys, bias, spec)
    weights = tl.exp2(powers(scores, spec) - shift)
    if MASKED:
        weights = tl.where(allowed(queries, keys, mask, spec), weights, 0.0)
    return weights, slope


@triton.jit
def score_gradient(weights, slope, a, b, queries, keys, delta, argmax, spec: tl.constexpr):
    """Gradient of the scaled and biased scores; a b^T of two sides is the gradient of the dropped weights.

    It is 0 for pairs that do not attend: their weights are, and so is delta in rows that attend to nothing.
    """
    if spec.DROPOUT:
        dweights = drop(product_of_rows(a, b, spec.DV, spec), queries, keys, spec) * spec.KEPT
        if spec.NORMALIZE:
            dweights -= delta
    elif spec.NORMALIZE:  # what the product is added to: so delta is in no registers of its own
        dweights = add_rows(tl.broadcast_to(-delta, weights.shape), a, b, spec.DV, spec)
    else:
        dweights = product_of_rows(a, b, spec.DV, spec)
    gradient = weights * dweights
    if spec.NORMALIZE:
        pass
    else:
        k, _, _, _, _ = keys
        gradient -= tl.where(k == argmax, delta, 0.0)
    if spec.CAP is not None:
        gradient = gradient * slope
    return gradient
