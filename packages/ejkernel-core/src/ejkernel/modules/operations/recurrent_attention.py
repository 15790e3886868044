"""Recurrent attention: linear attention whose state decays by any combination of gates."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.configs import RecurrentAttentionConfig
from ejkernel.modules.operations.shared import plain_recurrence
from ejkernel.modules.operations.shared.recurrences import always_returning_states
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.operation import document_options, run_operation


@document_options
def recurrent_attention(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t g k"],
    value: Float[Array, "b t g v"],
    g: Float[Array, "b t h"] | Float[Array, "b t h k"] | None = None,
    g_gamma: Float[Array, " h"] | Float[Array, "#b h"] | None = None,
    gk: Float[Array, "b t h k"] | None = None,
    gv: Float[Array, "b t h v"] | None = None,
    initial_state: Float[Array, "n h k v"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    state_indices: Integer[Array, " n"] | None = None,
    seg_ids: Integer[Array, "b t"] | None = None,
    parents: Integer[Array, "b t"] | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RecurrentAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "n h k v"] | Float[Array, "b t h k v"]]:
    """Computes linear attention with gates chunk by chunk (Katharopoulos et al. 2020; Yang et al. 2023,
    arXiv:2312.06635).

    Every head carries a state of shape [K, V]. Each token first decays it by its gates, which are logs (at most 0;
    -inf forgets), then writes `key value^T` into it, then reads `softmax_scale * state^T query`. Gates that are
    given together add up. Query head h reads KV head `h // (H // Hk)`. The formula is in
    `ejkernel.families.linear_recurrence`.

    Over devices, batch, heads and tokens can be split.

    Args:
        query: [B, T, H, K] float16, bfloat16, float32 or float64.
        key: [B, T, Hk, K], dtype of query; H is a multiple of Hk.
        value: [B, T, Hk, V], dtype of query.
        g: [B, T, H] or [B, T, H, K] floating, gate of a head or of each of its key channels. Differentiable, as are
            all gates.
        g_gamma: [H] or [B|1, H] floating, gate that is the same for all tokens.
        gk: [B, T, H, K] floating, gate of each key channel.
        gv: [B, T, H, V] floating, gate of each value channel.
        initial_state: [B, H, K, V] floating, or [N, H, K, V] with cu_seqlens: the state before the first token; None
            is zeros. Differentiable.
        cu_seqlens: [N + 1] int: sequence n owns tokens `cu_seqlens[n] : cu_seqlens[n + 1]` of the single row (B = 1, or
            arrays without the axis B), and has a separate state. May be traced; an eager call waits for the values and
            checks them. Sequences may be empty; padding tokens have output 0.
        state_indices: [N] int, with cu_seqlens: initial_state is slots, [slots, H, K, V], and sequence n continues the
            state in slot `state_indices[n]` and stores it there. Sequences with tokens have different slots; a sequence
            whose index is out of range, such as -1, starts from zeros, and its state is not kept. The states that are
            returned are the slots, in their dtype; donate them under `jax.jit`.
        seg_ids: [B, T] int of any dtype. A token whose id differs from that of the last real token before it starts
            from a zero state; a row's first segment continues from `initial_state`. Negative ids are padding, which
            leaves the state alone and has output 0. Not with cu_seqlens.
        parents: [B, T] int, or [T] where the arrays have no axis B: a tree of draft tokens to verify. An entry is the
            token that this one continues, by its index among those of its row or packed sequence, which is below its
            own; -1 continues the initial state. An output then depends on the token's ancestors alone, slots do not
            change, and with `return_state` a state is returned for each token:
            `ejkernel.modules.ragged.accept_states` stores those of the accepted tokens. May be traced; values that are
            not are checked. Not with seg_ids or reverse.
        softmax_scale: Factor on the output; None means `K ** -0.5`.
        reverse: Go from the last token of each sequence to the first.
        return_state: Also return the states after the last token taken; with `parents` those after every token.

    Returns:
        [B, T, H, V] in query's dtype; with `return_state` also the states, [B, H, K, V] or [N, H, K, V], float32
        (float64 for float64 inputs), or [B, T, H, K, V] with `parents`. Empty sequences keep their initial state.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import recurrent_attention

        query = key = jax.random.normal(jax.random.key(0), (1, 128, 4, 32))
        value = jax.random.normal(jax.random.key(1), (1, 128, 4, 64))
        g = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(2), (1, 128, 4)))
        output, state = recurrent_attention(query, key, value, g, return_state=True)
        assert output.shape == (1, 128, 4, 64) and state.shape == (1, 4, 32, 64)
        ```
    """
    return run_operation(OP, locals())


class RecurrentAttentionArguments(plain_recurrence.CanonicalCall, ArgumentRecord, of=recurrent_attention):
    """The arguments of a call of `recurrent_attention`."""


def as_recurrent(args: Any, **gates: Any) -> RecurrentAttentionArguments:
    """Returns the `recurrent_attention` call that another operation of this kind means.

    Args:
        args: Its record.
        **gates: The gates that are not the record's own.
    """
    names = [field.name for field in dataclasses.fields(RecurrentAttentionArguments)]
    return RecurrentAttentionArguments(**{name: getattr(args, name) for name in names if hasattr(args, name)}, **gates)


class RecurrentAttention(Kernel[RecurrentAttentionConfig, Array]):
    """Wraps `recurrent_attention` in an object that an `Executor` can call."""


OP = plain_recurrence.declare_recurrence(
    RecurrentAttentionArguments,
    recurrence_cases.recurrent_attention_cases,
    axes={**plain_recurrence.STATE_AXES, "g": "b t h k"},
)
RecurrentAttention.op = OP
recurrent = always_returning_states(OP, "recurrent")
