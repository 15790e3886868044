"""Kernel delta attention: the gated delta rule with a decay for each head or each key channel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import linear_recurrence
from ejkernel.modules.operations.cases import delta as delta_cases
from ejkernel.modules.operations.cases import recurrence as recurrence_cases
from ejkernel.modules.operations.configs import KernelDeltaAttentionConfig
from ejkernel.modules.operations.shared import delta_rule
from ejkernel.modules.operations.shared.conditions import conditions_of_cumulative_lengths, conditions_of_trees
from ejkernel.modules.operations.shared.recurrences import TOLERANCE, check_and_canonicalise_packing
from ejkernel.modules.operations.shared.shapes import as_count, as_flag, as_number
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.promotion import with_standard_promotion


@document_options
def kernel_delta_attention(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t g k"],
    value: Float[Array, "b t g v"],
    beta: Float[Array, "b t h"],
    decay: Float[Array, "b t h"] | Float[Array, "b t h k"] | None = None,
    initial_state: Float[Array, "b h k v"] | None = None,
    *,
    seg_ids: Integer[Array, "b t"] | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    parents: Integer[Array, "b t"] | None = None,
    softmax_scale: float | None = None,
    chunk_size: int | None = None,
    use_qk_l2norm: bool = True,
    use_chunked: bool = True,
    return_state: bool = False,
    platform: str | None = None,
    cfg: KernelDeltaAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | tuple[Float[Array, "b t h v"], Float[Array, "b h k v"] | Float[Array, "b t h k v"]]:
    """Computes the delta rule with gates chunk by chunk (Kimi Team 2025, arXiv:2510.26692; Yang et al. 2024,
    arXiv:2412.06464).

    Every head carries a state S of shape [K, V]. Each token first decays it by `exp(decay)`, then corrects what it
    holds for its key, `S += key (beta (value - S^T key))^T`, then reads `softmax_scale * S^T query`. Query head h reads
    KV head `h // (H // Hk)`. The formula is in `ejkernel.families.linear_recurrence`.

    Over devices, batch, heads and tokens can be split.

    Args:
        query: [B, T, H, K] float16, bfloat16, float32 or float64.
        key: [B, T, Hk, K], dtype of query; H is a multiple of Hk.
        value: [B, T, Hk, V], dtype of query. With more value heads than key heads it is [B, T, H, V], and queries have
            the heads of keys, [B, T, Hk, K]: value head h reads query and key head `h // (H // Hk)`.
        beta: [B, T, H] floating, strength of the correction, 0 to 1 (2 with negative eigenvalues). Differentiable.
        decay: [B, T, H] or [B, T, H, K] floating, log of the decay of a head or of each of its key channels, at most 0;
            -inf forgets. `kda_decay` makes it. Differentiable.
        initial_state: [B, H, K, V] floating, the state before the first token; None is zeros. Differentiable.
        seg_ids: [B, T] int of any dtype. A token whose id differs from that of the last real token before it starts
            from a zero state; a row's first segment continues from `initial_state`. Negative ids are padding, which
            leaves the state alone and has output 0.
        cu_seqlens: [N + 1] int cumulative lengths of N packed sequences, with B = 1; each has a separate state,
            [N, H, K, V]. May be traced; an eager call waits for the values and checks them. Sequences may be empty;
            padding tokens have output 0. Not with seg_ids.
        parents: [B, T] int, a tree of draft tokens to verify: the token that each token continues, by its index among
            those of its row or packed sequence, which is below its own; -1 continues the initial state. An output then
            depends on the token's ancestors alone, and a state is returned for each token. May be traced; values that
            are not are checked. Not with seg_ids.
        softmax_scale: Factor on the output; None means `K ** -0.5`.
        chunk_size: Tokens per chunk, in place of the configuration's; changes speed, not results.
        use_qk_l2norm: Divide query and key by their lengths, `x * rsqrt(sum x^2 + 1e-6)`.
        use_chunked: False goes token by token: slower, with the same results.
        return_state: Also return the states after the last token; with `parents` those after every token.

    Returns:
        [B, T, H, V] in query's dtype; with `return_state` also the states [B, H, K, V], or [B, T, H, K, V] with
        `parents`, float32 (float64 for float64 inputs).

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import kda_decay, kernel_delta_attention

        query, key, value, gate = jax.random.normal(jax.random.key(0), (4, 1, 128, 4, 32))
        beta = jax.nn.sigmoid(jax.random.normal(jax.random.key(1), (1, 128, 4)))
        decay = kda_decay(gate, jnp.zeros(4), jnp.zeros((4, 32)))
        output = kernel_delta_attention(query, key, value, beta, decay)
        assert output.shape == (1, 128, 4, 32)
        ```
    """
    return run_operation(OP, locals())


class KernelDeltaAttentionArguments(ArgumentRecord, of=kernel_delta_attention):
    """The arguments of a call of `kernel_delta_attention`."""

    def __post_init__(self) -> None:
        scale, size = self.softmax_scale, self.chunk_size
        object.__setattr__(self, "softmax_scale", None if scale is None else as_number("softmax_scale", scale))
        object.__setattr__(self, "chunk_size", None if size is None else as_count("chunk_size", size, 1))
        for name in ("use_qk_l2norm", "use_chunked", "return_state"):
            object.__setattr__(self, name, as_flag(name, getattr(self, name)))
        check_and_canonicalise_packing(self)


kda_attention = kernel_delta_attention


@with_standard_promotion
def kda_decay(
    gate: Float[Array, "*tokens h"] | Float[Array, "*tokens h k"],
    A_log: Float[Array, " h"] | Float[Array, "1 1 h 1"],
    dt_bias: Float[Array, " h"] | Float[Array, "h k"] | Float[Array, " h*k"],
    lower_bound: float | None = None,
) -> Float[Array, "*tokens h"] | Float[Array, "*tokens h k"]:
    """Returns log decay from a gate, `-exp(A_log) * softplus(gate + dt_bias)`, in at least float32.

    With `lower_bound` it is `lower_bound * sigmoid(exp(A_log) * (gate + dt_bias))`, the bounded gate of Ling (Bailing)
    and GLM-5, which they call a safe gate.

    Args:
        gate: [..., H], or [..., H, K] for a decay of each key channel.
        A_log: [H], or [1, 1, H, 1] as checkpoints store it.
        dt_bias: [H]; with a gate of each key channel [H, K], or [H * K] as checkpoints store it.
        lower_bound: The least log decay, < 0; -5 in the checkpoints of Ling. None for no bound.

    Returns:
        gate's shape, at most 0.

    Raises:
        ValueError: The shapes do not fit together, or the bound is not negative.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import kda_decay

        assert kda_decay(jnp.zeros((1, 8, 2)), jnp.zeros(2), jnp.zeros(2)).shape == (1, 8, 2)
        ```
    """
    dtype, heads = jnp.promote_types(gate.dtype, jnp.float32), A_log.size
    channels = _has_channel_gates(gate, A_log, dt_bias)
    rate = jnp.exp(A_log.reshape(heads, *([1] if channels else [])).astype(dtype))
    bias = dt_bias.reshape(heads, *([gate.shape[-1]] if channels else [])).astype(dtype)
    if lower_bound is not None:
        return as_number("lower_bound", lower_bound, less_than=0.0) * jax.nn.sigmoid(rate * (gate.astype(dtype) + bias))
    return -rate * jax.nn.softplus(gate.astype(dtype) + bias)


def _has_channel_gates(gate: Any, A_log: Any, dt_bias: Any) -> bool:
    """Returns whether a gate has an entry for each key channel; refuses shapes that fit neither kind."""
    heads, biases = A_log.size, dt_bias.size
    if A_log.shape not in ((heads,), (1, 1, heads, 1)):
        raise ValueError(f"A_log: got shape {tuple(A_log.shape)}, wants [H], or [1, 1, H, 1] as checkpoints store it")
    if gate.shape[-1:] == (heads,) and dt_bias.shape == (heads,):
        return False
    per_channel = gate.shape[-2:-1] == (heads,) and biases == heads * gate.shape[-1]
    if per_channel and dt_bias.shape in ((biases,), (heads, gate.shape[-1])):
        return True
    flat = gate.ndim > 0 and biases == gate.shape[-1] and biases % heads == 0
    instead = f"; reshape a gate [..., H * K] to [..., {heads}, {biases // heads}]" if flat else ""
    raise ValueError(
        f"gate: got shape {tuple(gate.shape)} with A_log of {heads} heads and dt_bias {tuple(dt_bias.shape)}, wants "
        f"[..., H={heads}] with dt_bias [H], or [..., H={heads}, K] with dt_bias [H, K] or [H * K]{instead}"
    )


def _configure(args: KernelDeltaAttentionArguments, cfg: Any) -> Any:
    return delta_rule.configure(OP, args, cfg)


class KernelDeltaAttention(Kernel[KernelDeltaAttentionConfig, Array]):
    """Wraps `kernel_delta_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=KernelDeltaAttentionArguments,
    family=linear_recurrence.FAMILY,
    validate=delta_rule.validate,
    lower=delta_rule.lower,
    conditions=conditions_of_trees(conditions_of_cumulative_lengths("cu_seqlens", "query")),
    axes_of=delta_rule.axes_of,
    cases=delta_cases.kernel_delta_attention_cases(KernelDeltaAttentionArguments),
    tolerance=TOLERANCE,
    make_inputs=recurrence_cases.make_inputs,
    axes={"decay": "b t h k"},
    finish=delta_rule.finish,
    configure=_configure,
)
KernelDeltaAttention.op = OP
