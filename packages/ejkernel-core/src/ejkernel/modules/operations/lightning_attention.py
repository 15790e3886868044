"""Lightning attention: linear attention whose heads decay at fixed rates."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.configs import LightningAttentionConfig
from ejkernel.modules.operations.recurrent_attention import as_recurrent
from ejkernel.modules.operations.shared import plain_recurrence
from ejkernel.modules.operations.shared.plain_recurrence import canonicalise
from ejkernel.modules.operations.shared.recurrences import always_returning_states, rank
from ejkernel.modules.operations.shared.shapes import as_count, check_dtype, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.operation import document_options, run_operation


@document_options
def lightning_attention(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t g k"],
    value: Float[Array, "b t g v"],
    initial_state: Float[Array, "n h k v"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    *,
    state_indices: Integer[Array, " n"] | None = None,
    seg_ids: Integer[Array, "b t"] | None = None,
    parents: Integer[Array, "b t"] | None = None,
    slopes: Float[Array, " h"] | None = None,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | None = None,
    cfg: LightningAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "n h k v"] | Float[Array, "b t h k v"]]:
    """Computes linear attention with a fixed decay per head chunk by chunk (Qin et al. 2024, arXiv:2401.04658).

    `recurrent_attention` with `g_gamma[h] = -(8 / H) * (1 - layer_idx / num_layers) * h`: head 0 never decays, later
    layers decay less, and `layer_idx == num_layers` not at all. H is the number of query heads of the whole call, also
    when the heads are split over devices by `mesh`. Query head h reads KV head `h // (H // Hk)`.

    Over devices, batch, heads and tokens can be split.

    Args:
        query: [B, T, H, K] float16, bfloat16, float32 or float64.
        key: [B, T, Hk, K], dtype of query; H is a multiple of Hk.
        value: [B, T, Hk, V], dtype of query.
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
        slopes: [H] floating, how much each head decays per token: its log decay is `-slope`. In place of layer_idx and
            num_layers, for models with slopes of their own; MiniMax has `2 ** (-8 * (h + 1) / H)` times a factor of the
            layer. Differentiable.
        layer_idx: Index of the layer, an int >= 0; needed without slopes.
        num_layers: Number of layers, an int >= 1; needed without slopes.
        softmax_scale: Factor on the output; None means `K ** -0.5`.
        reverse: Go from the last token of each sequence to the first.
        return_state: Also return the states after the last token taken; with `parents` those after every token.

    Returns:
        [B, T, H, V] in query's dtype; with `return_state` also the states, [B, H, K, V] or [N, H, K, V], float32
        (float64 for float64 inputs), or [B, T, H, K, V] with `parents`. Empty sequences keep their initial state.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import lightning_attention

        query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 128, 8, 64))
        output = lightning_attention(query, key, value, layer_idx=3, num_layers=24)
        assert output.shape == (1, 128, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class LightningAttentionArguments(ArgumentRecord, of=lightning_attention):
    """The arguments of a call of `lightning_attention`."""

    def __post_init__(self) -> None:
        for name, least in (("layer_idx", 0), ("num_layers", 1)):
            number = getattr(self, name)
            if self.slopes is None:
                number = as_count(name, number, least)
            elif number is not None:
                raise ValueError(f"{name}: got {number} with slopes, wants slopes alone or layer_idx and num_layers")
            object.__setattr__(self, name, number)
        canonicalise(self)


def default_decay(heads: int, layer_idx: int, num_layers: int, dtype: Any = jnp.float32) -> jax.Array:
    """Returns log decay of each head, [H]."""
    return -(8 / max(heads, 1)) * (1 - layer_idx / num_layers) * jnp.arange(heads, dtype=dtype)


def _as_recurrent_call(args: LightningAttentionArguments) -> Any:
    """Returns the same call with its decay spelt out; without decay where every slope is 0."""
    if args.slopes is not None:
        return as_recurrent(args, g_gamma=-args.slopes)
    if rank(args.query) < 3 or args.layer_idx is None or args.num_layers in (None, args.layer_idx):
        return as_recurrent(args)
    dtype = jnp.promote_types(args.query.dtype, jnp.float32)
    return as_recurrent(args, g_gamma=default_decay(args.query.shape[-2], args.layer_idx, args.num_layers, dtype))


def validate(args: LightningAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    if args.slopes is not None:
        check_shape("slopes", args.slopes, "H", {"H": args.query.shape[-2]})
        check_dtype("slopes", args.slopes, jnp.floating, "a floating dtype")
    plain_recurrence.validate(_as_recurrent_call(args))


def lower(args: LightningAttentionArguments) -> LinearRecurrence:
    """Returns the family's record of a call."""
    return plain_recurrence.lower(_as_recurrent_call(args))


class LightningAttention(Kernel[LightningAttentionConfig, Array]):
    """Wraps `lightning_attention` in an object that an `Executor` can call."""


OP = plain_recurrence.declare_recurrence(
    LightningAttentionArguments,
    recurrence_cases.lightning_attention_cases,
    axes=plain_recurrence.STATE_AXES,
    validate=validate,
    lower=lower,
)
LightningAttention.op = OP
lightning_attn = always_returning_states(OP, "lightning_attn")
