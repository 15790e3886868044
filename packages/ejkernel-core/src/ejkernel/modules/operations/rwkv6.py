"""RWKV-6 (Finch): a gated linear recurrence whose current token has a separate weight, the bonus."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families.linear_recurrence import (
    LinearRecurrence,
    accumulator,
    num_state_heads,
    states,
    with_plain_states,
)
from ejkernel.modules.operations.cases import rwkv as rwkv_cases
from ejkernel.modules.operations.configs import RWKV6Config
from ejkernel.modules.operations.shared import plain_recurrence, rwkv
from ejkernel.modules.operations.shared.recurrences import check_floating
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.invariant_rows import compute_rows
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning import packing


@document_options
def rwkv6(
    r: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g v"],
    w: Float[Array, "b t h k"],
    u: Float[Array, "h k"],
    *,
    softmax_scale: float | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    reverse: bool = False,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    state_indices: Integer[Array, " n"] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RWKV6Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "n h k v"]]:
    """Computes the time mixing of RWKV-6, chunk by chunk (Peng et al. 2024, arXiv:2404.05892).

    Every head carries a state S of shape [K, V]. Each token reads the state before it and its own key and value, which
    have the weight u, and then decays the state and writes:

        o_t = softmax_scale * (S + diag(u) k_t v_t^T)^T r_t
        S   = diag(exp(w_t)) S + k_t v_t^T

    This is `gated_linear_attention`, read one token earlier: the same kernels compute it, and add the bonus after.
    Head h of r reads head `h // (H // Hk)` of k and v.

    Over devices, batch, heads and tokens can be split.

    Args:
        r: [B, T, H, K] float16, bfloat16, float32 or float64, the receptance, which reads the state.
        k: [B, T, Hk, K], dtype of r; H is a multiple of Hk.
        v: [B, T, Hk, V], dtype of r.
        w: [B, T, H, K] floating, log of the decay of each key channel, at most 0; -inf forgets. RWKV's layers compute
            it as `-exp(...)`. Differentiable, as are all floating arguments.
        u: [H, K] floating, the bonus: weight of the current token's key channels.
        softmax_scale: Factor on the output; None means `K ** -0.5`. RWKV's own layers have 1.
        initial_state: [B, H, K, V] floating, or [N, H, K, V] with cu_seqlens: the state before the first token; None
            is zeros.
        reverse: Go from the last token of each sequence to the first.
        cu_seqlens: [N + 1] int: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]` of the single row (B = 1, or
            arrays without the axis B), and has a separate state. May be traced; an eager call waits for the values and
            checks them. Sequences may be empty; padding tokens have output 0.
        state_indices: [N] int, with cu_seqlens: initial_state is slots, [slots, H, K, V], and sequence n continues the
            state in slot `state_indices[n]` and stores it there. Sequences with tokens have different slots; a sequence
            whose index is out of range, such as -1, starts from zeros, and its state is not kept. The states that are
            returned are the slots, in their dtype; donate them under `jax.jit`.
        return_state: Also return the states after the last token taken.

    Returns:
        [B, T, H, V] in r's dtype; with `return_state` also the states, [B, H, K, V] or [N, H, K, V], float32
        (float64 for float64 inputs). Empty sequences keep their initial state.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import rwkv6

        r, k, v, w = jax.random.normal(jax.random.key(0), (4, 1, 128, 4, 32))
        u = jax.random.normal(jax.random.key(1), (4, 32))
        output, state = rwkv6(r, k, v, -jnp.exp(w - 4), u, return_state=True)
        assert output.shape == (1, 128, 4, 32) and state.shape == (1, 4, 32, 32)
        ```
    """
    return run_operation(OP, locals())


class RWKV6Arguments(rwkv.CanonicalCall, ArgumentRecord, of=rwkv6):
    """The arguments of a call of `rwkv6`."""


def validate(args: RWKV6Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes = rwkv.check_tokens(args)
    if args.u is None:
        raise ValueError(f"u: got None, wants [H, K], {[sizes['H'], sizes['K']]}")
    check_floating("u", args.u, "H K", sizes)


def lower(args: RWKV6Arguments) -> LinearRecurrence:
    """Returns the family's record of a call: each token reads, after its write, for the token that follows it."""
    record = _as_gated_linear_record(args)
    if is_batch_invariant():
        return _with_reading_tokens(record)
    following = jnp.pad(record.query[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
    if record.cu_seqlens is not None:
        ids, _ = packing.packed_ids(record.cu_seqlens, record.query.shape[1])
        same = jnp.pad((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0), ((0, 0), (0, 1)))
        following = jnp.where(same[:, :, None, None], following, 0)
    return dataclasses.replace(record, query=following)


def finish(args: RWKV6Arguments, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the public result: what was read for each token, and the token's own term."""
    record = _as_gated_linear_record(args)
    if record.query.size:
        if is_batch_invariant():
            read = output[0][:, ::2].astype(accumulator(record))
        else:
            read = jnp.pad(output[0][:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))).astype(accumulator(record))
            read = _with_reads_of_first_tokens(record, read)
        output = _with_bonus(record, args.u, read).astype(record.query.dtype), output[1]
    return rwkv.finish(args, output)


def _with_reading_tokens(record: LinearRecurrence) -> LinearRecurrence:
    """Returns the record with a token before each that reads, writes nothing and does not decay; the others do not
    read. In a `batch_invariant` block, first tokens so read their initial state by the same program as the others.
    """

    def interleave(first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.stack([first, second], axis=2).reshape(first.shape[0], -1, *first.shape[2:])

    tokens = {name: getattr(record, name) for name in ("key", "value", "decay")}
    writes = {name: None if x is None else interleave(jnp.zeros_like(x), x) for name, x in tokens.items()}
    query = interleave(record.query, jnp.zeros_like(record.query))
    bounds = None if record.cu_seqlens is None else 2 * record.cu_seqlens
    return dataclasses.replace(record, query=query, cu_seqlens=bounds, **writes)


def _as_gated_linear_record(args: RWKV6Arguments) -> LinearRecurrence:
    """Returns the record of gated linear attention, whose tokens are in the order of the recurrence."""
    return plain_recurrence.lower(rwkv.as_recurrent_call(args))


def _with_reads_of_first_tokens(record: LinearRecurrence, reads: jax.Array) -> jax.Array:
    """Returns the reads [B, T, H, V] with those of first tokens, which read the state before their sequence."""
    plain = with_plain_states(record)
    bounds, query = record.cu_seqlens, record.query.astype(reads.dtype)
    if bounds is None:
        first = _read_states(record, states(plain), query[:, 0]) if plain.initial_state is not None else 0
        return reads.at[:, 0].set(first)
    tokens, bounds = query.shape[1], bounds.astype(jnp.int32)
    filled = jnp.diff(bounds) > 0
    # Selected before the product: an empty sequence would read with a token of another sequence, or with padding.
    query = jnp.where(filled[:, None, None], query[0, jnp.minimum(bounds[:-1], tokens - 1)], 0)
    state = jnp.where(filled[:, None, None, None], states(plain), 0)
    first = _read_states(record, state, query)
    return reads.at[0, jnp.where(filled, bounds[:-1], tokens)].set(first, mode="drop")


def _read_states(record: LinearRecurrence, state: jax.Array, query: jax.Array) -> jax.Array:
    """Returns what queries [n, H, K] read from states [n, H, K, V]: [n, H, V]."""
    highest = jax.lax.Precision.HIGHEST
    return record.softmax_scale * jnp.einsum("nhkv,nhk->nhv", state, query, precision=highest)


def _with_bonus(record: LinearRecurrence, u: jax.Array, reads: jax.Array) -> jax.Array:
    """Returns the reads plus each token's own term, and 0 for padding tokens."""
    query, key, value = (x.astype(reads.dtype) for x in (record.query, record.key, record.value))
    if record.cu_seqlens is not None:
        real = packing.packed_ids(record.cu_seqlens, query.shape[1])[0][:, :, None, None] >= 0
        query, key, value, reads = (jnp.where(real, x, 0) for x in (query, key, value, reads))
    shared = num_state_heads(record) // key.shape[2]
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    add = functools.partial(_add_bonus, softmax_scale=record.softmax_scale)
    return compute_rows(add, (reads, query, key, value), (u.astype(reads.dtype),), axes=2)


def _add_bonus(
    reads: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, u: jax.Array, softmax_scale: float
) -> jax.Array:
    highest = jax.lax.Precision.HIGHEST
    weight = softmax_scale * jnp.einsum("bthk,bthk->bth", query * u, key, precision=highest)
    return reads + weight[..., None] * value


class RWKV6(Kernel[RWKV6Config, Array]):
    """Wraps `rwkv6` in an object that an `Executor` can call."""


OP = rwkv.declare_rwkv_recurrence(RWKV6Arguments, rwkv_cases.rwkv6_cases, validate=validate, lower=lower, finish=finish)
RWKV6.op = OP
