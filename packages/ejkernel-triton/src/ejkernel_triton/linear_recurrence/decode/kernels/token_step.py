"""One token of the decode step: what it loads, and how it updates the state."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E


@triton.jit
def load_token_channels(at, token, channels, token_exists, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Returns a token's channels in float32; 0 beyond WIDTH and for a missing token."""
    mask = (channels < WIDTH) & (token_exists + 0 * channels > 0)  # the interpreter has no & of a vector and a scalar
    return tl.load(at + token * STRIDE + channels, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_token_scalar(at, token, token_exists, STRIDE: tl.constexpr):
    """Returns a token's scalar in float32."""
    return tl.load(at + token * STRIDE, mask=token_exists > 0, other=0.0).to(tl.float32)


@triton.jit
def load_token(
    query,
    key,
    value,
    decay,
    value_decay,
    beta,
    dt,
    segment_roles,
    parents,
    token,
    end,
    channels,
    columns,
    spec: tl.constexpr,
):
    """Loads a token: its row of every field, 0 for absent fields, its role in its segment and its parent in a tree."""
    # The loop also issues the load after the last token, masked, so that it has no branch.
    token_exists = tl.cast(token < end, tl.int32)
    segment_role = token_exists
    if spec.HAS_SEGMENTS:
        segment_role = tl.load(segment_roles + token, mask=token_exists > 0, other=0)
        token_exists = segment_role
    q = load_token_channels(query, token, channels, token_exists, spec.K, spec.HQ * spec.K)
    k = load_token_channels(key, token, channels, token_exists, spec.K, spec.HK * spec.K)
    v = load_token_channels(value, token, columns, token_exists, spec.V, spec.HV * spec.V)
    # An absent field is a scalar that nothing reads: the loop must carry the same variables in every iteration.
    g = tl.cast(end * 0, tl.float32)
    w = g
    b = g
    if spec.GATE_CHANNELS == 1:
        g = load_token_scalar(decay, token, token_exists, spec.GATE_TOKEN_STRIDE)
    if spec.GATE_CHANNELS > 1:
        g = load_token_channels(decay, token, channels, token_exists, spec.K, spec.GATE_TOKEN_STRIDE)
    if spec.HAS_VALUE_DECAY:
        w = load_token_channels(value_decay, token, columns, token_exists, spec.V, spec.H * spec.V)
    if spec.HAS_BETA:
        b = load_token_scalar(beta, token, token_exists, spec.H)
    if spec.HAS_DT:
        b = load_token_scalar(dt, token, token_exists, spec.H)
    parent = segment_role
    if spec.HAS_TREES:
        parent = tl.load(parents + token, mask=token_exists > 0, other=0)
    return q, k, v, g, w, b, segment_role, parent


@triton.jit
def update_state(state, k, v, g, w, b, segment_role, spec: tl.constexpr):
    """Returns the state [K, V] after a token: restart, decay, write."""
    if spec.HAS_SEGMENTS:
        # `where` instead of a product: inf or NaN of the previous segment must not reach this one.
        state = tl.where(segment_role > 1, 0.0, state)
    if spec.GATE_CHANNELS == 1:
        state *= tl.exp2(g * LOG2E)
    if spec.GATE_CHANNELS > 1:
        state *= tl.exp2(g * LOG2E)[:, None]
    if spec.HAS_VALUE_DECAY:
        state *= tl.exp2(w * LOG2E)[None, :]
    u = v
    if spec.HAS_DT:
        u = b * v
    if spec.HAS_BETA:
        # The sum crosses the program's warps through shared memory; a program of one warp needs none. For a single
        # token the products are matrix times vector: tensor cores would not help, since they are memory-bound.
        u = b * (v - tl.sum(state * k[:, None], axis=0))
    if spec.HAS_SEGMENTS:
        # Padding has k = 0, but inf of the state times 0 is NaN in the sum above: u must be 0 too.
        u = tl.where(segment_role > 0, u, 0.0)
    return state + k[:, None] * u[None, :]
