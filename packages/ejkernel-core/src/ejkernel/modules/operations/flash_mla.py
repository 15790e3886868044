"""Multi-head latent attention: keys and values are read out of one latent vector a token."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import flash_mla as cases
from ejkernel.modules.operations.configuration.latent import FlashMLAConfig
from ejkernel.modules.operations.flash_attention import flash_call
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.shared.conditions import conditions_of_cumulative_lengths
from ejkernel.modules.operations.shared.latent_inputs import (
    as_logits_dtype,
    check_self_attention_sizes,
    project_latent,
    rng_seed,
    set_canonical_values,
    with_accumulator_dtype,
)
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.shapes import (
    as_dropout_seed,
    as_flag,
    as_number,
    as_window,
    check_cumulative_lengths,
    check_dtype,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.types import MaskInfo


@document_options
def flash_mla(
    query: Float[Array, "b t h d"],
    key_value: Float[Array, "b t r"],
    w_kc: Float[Array, "r g n"],
    w_vc: Float[Array, "r g v"],
    b_q: Float[Array, "b t c"] | None = None,
    b_k: Float[Array, "b t c"] | None = None,
    cu_seqlens: Integer[Array, " n"] | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    attention_mask: Bool[Array, "#b #h #t #t"] | Integer[Array, "#b #h #t #t"] | None = None,
    bias: Float[Array, "#b #h #t #t"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    logits_soft_cap: float | None = None,
    deterministic: bool = True,
    dropout_rng: int | Integer[Array, ""] | PRNGKeyArray | None = None,
    dropout_prob: float = 0.0,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_dtype: Any = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: FlashMLAConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | WithLse:
    """Computes self-attention whose keys and values are projections of a latent vector (DeepSeek-V2, 2024,
    arXiv:2405.04434).

    Shape letters: B batch, T tokens, H query heads, Hk KV heads, R latent size, Dn and Dr sizes of a key without and
    with rotary position, Dv value size. Query head h reads KV head `h // (H // Hk)`. Of KV head g:

        k_nope_j = key_value_j @ w_kc[:, g]
        v_j      = key_value_j @ w_vc[:, g]

    and a score, before what `ejkernel.families.tiled_attention` says about scores, is one of

        (a) q . k_nope                 without b_k; Dq = Dn
        (b) q_nope . k_nope + q_rope . b_k      with b_k; query is [nope | rope], Dq = Dn + Dr
        (c) q . k_nope + b_q . b_k     with b_q and b_k, both shared by all heads; Dq = Dn

    Keys and values are made for the KV heads, in memory linear in T, and attended to tile by tile: with as many
    queries as keys that costs fewer products than attending to the latent vectors themselves (the *absorbed* form),
    which is what `mla_decode` does with one query a row.

    Over devices, batch, heads and the query's tokens can be split.

    Args:
        query: [B, T, H, Dq] float16, bfloat16, float32 or float64.
        key_value: [B, T, R] latent vectors, dtype of query.
        w_kc: [R, Hk, Dn], dtype of query; H is a multiple of Hk.
        w_vc: [R, Hk, Dv], dtype of query.
        b_q: [B, T, Dr], dtype of query; only with b_k.
        b_k: [B, T, Dr], dtype of query.
        cu_seqlens: Cumulative lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each other and
            whose positions restart; with B > 1, [B + 1], row b holding one sequence followed by padding. May be traced;
            an eager call waits for the values and checks them. Sequences may be empty.
        softmax_scale: Factor on the scores; None means one over the root of a key's size, Dn or Dn + Dr.
        causal: Key position at most query position.
        attention_mask: [B|1, H|1, T|1, T|1] bool or int, True (or nonzero) attends. Applies together with the bias.
        bias: [B|1, H|1, T|1, T|1] floating, added to the scaled scores before the soft cap; -inf masks. Differentiable.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        deterministic: True drops nothing, whatever `dropout_prob` is.
        dropout_rng: A PRNG key, or an integer of which the low 32 bits count; may be traced. None means 0, with one
            warning a process. The same one drops the same weights on every backend, in both passes.
        dropout_prob: Probability in [0, 1) of dropping a softmax weight; kept ones are scaled by `1 / (1 - p)`.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        softmax_dtype: Floating dtype that scores are rounded to before the softmax; None, float32 and wider ones round
            nothing.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, T, H, Dv] in query's dtype. Rows with nothing to attend are 0, and so is their gradient.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_mla

        keys = jax.random.split(jax.random.key(0), 5)
        query = jax.random.normal(keys[0], (1, 128, 8, 32 + 16))  # [nope | rope]
        latent = jax.random.normal(keys[1], (1, 128, 64))
        w_kc, w_vc = jax.random.normal(keys[2], (64, 8, 32)), jax.random.normal(keys[3], (64, 8, 40))
        k_rope = jax.random.normal(keys[4], (1, 128, 16))
        output = flash_mla(query, latent, w_kc, w_vc, None, k_rope, causal=True)
        assert output.shape == (1, 128, 8, 40)
        ```
    """
    return run_operation(OP, locals())


class FlashMLAArguments(ArgumentRecord, of=flash_mla):
    """The arguments of a call of `flash_mla`."""

    def __post_init__(self) -> None:
        scale, cap = self.softmax_scale, self.logits_soft_cap
        set_canonical_values(
            self,
            return_lse=as_flag("return_lse", self.return_lse),
            softmax_scale=None if scale is None else as_number("softmax_scale", scale),
            causal=as_flag("causal", self.causal),
            logits_soft_cap=None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            deterministic=as_flag("deterministic", self.deterministic),
            dropout_prob=as_number("dropout_prob", self.dropout_prob, minimum=0, less_than=1),
            sliding_window=as_window("sliding_window", self.sliding_window),
            softmax_dtype=as_logits_dtype("softmax_dtype", self.softmax_dtype),
        )
        set_canonical_values(
            self, dropout_rng=as_dropout_seed("dropout_rng", self.dropout_rng, self.effective_dropout_prob > 0)
        )
        # Checked here, as the rest of the call is traced and cannot read values.
        if self.cu_seqlens is not None and getattr(self.query, "ndim", 0) == 4:
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, *self.query.shape[:2])

    @property
    def effective_dropout_prob(self) -> float:
        """Returns the probability of dropping a weight in this call."""
        return 0.0 if self.deterministic else self.dropout_prob


mla_attention = flash_mla


def validate(args: FlashMLAArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes = check_self_attention_sizes(args)
    if args.attention_mask is not None:
        check_shape("attention_mask", args.attention_mask, "B H T T", sizes, broadcast="B H T")
        if not jnp.issubdtype(args.attention_mask.dtype, jnp.integer):
            check_dtype("attention_mask", args.attention_mask, jnp.bool_, "bool or an integer dtype")
    if args.cu_seqlens is not None:
        check_shape("cu_seqlens", args.cu_seqlens, "N+1" if sizes["B"] == 1 else "B+1", {"B+1": sizes["B"] + 1})
        check_dtype("cu_seqlens", args.cu_seqlens, jnp.integer, "an integer dtype")
        if not args.cu_seqlens.size:
            raise ValueError("cu_seqlens: got shape (0,), wants [N + 1]")
    _check_rng(args)
    shape = args.query.shape
    keys = jax.ShapeDtypeStruct((*shape[:2], sizes["Hk"], shape[3]), args.query.dtype)
    # What is said of these two there holds here.
    validate_flash(flash_call(query=args.query, key=keys, value=keys, bias=args.bias, softmax_aux=args.softmax_aux))


def _check_rng(args: FlashMLAArguments) -> None:
    rng = args.dropout_rng
    if rng is None:
        return
    dtype, shape = getattr(rng, "dtype", None), jnp.shape(rng)
    key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    whole = dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or key) and shape == ()
    if not whole and not (dtype == jnp.uint32 and len(shape) == 1):
        raise ValueError(f"dropout_rng: got {got(rng)}, wants a PRNG key or an integer of shape ()")


def lower(args: FlashMLAArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call: keys and values of the KV heads, made out of the latent vectors."""
    query, key = args.query, project_latent(args.key_value, args.w_kc)
    if args.b_k is not None:
        key = jnp.concatenate([key, _project_for_heads(args.b_k, key.shape[2])], axis=-1)
    if args.b_q is not None:
        query = jnp.concatenate([query, _project_for_heads(args.b_q, query.shape[2])], axis=-1)
    mask = args.attention_mask
    return lower_flash(
        flash_call(
            query=query,
            key=key,
            value=project_latent(args.key_value, args.w_vc),
            bias=args.bias,
            cum_seqlens_q=args.cu_seqlens,
            softmax_aux=args.softmax_aux,
            mask_info=None if mask is None else MaskInfo(_attention_mask=mask.astype(bool)),
            softmax_scale=args.softmax_scale,
            dropout_prob=args.effective_dropout_prob,
            causal=args.causal,
            dropout_seed=rng_seed(args.dropout_rng) if args.effective_dropout_prob > 0 else None,
            sliding_window=args.sliding_window,
            logits_soft_cap=args.logits_soft_cap,
            logits_dtype=args.softmax_dtype,
        )
    )


def _project_for_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns [B, T, n] -> [B, T, heads, n]."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], heads, x.shape[2]))


def reference(args: FlashMLAArguments) -> Any:
    """Returns the operation's meaning in plain jnp; keys and values are not rounded to the arguments' dtype."""
    with jax.default_matmul_precision("highest"):
        output, residuals = tiled_attention.reference(lower(with_accumulator_dtype(args)))
    return with_lse(args, output.astype(args.query.dtype), residuals.lse)


class FlashMLA(Kernel[FlashMLAConfig, Array]):
    """Wraps `flash_mla` in an object that an `Executor` can call."""


OP = Op(
    arguments=FlashMLAArguments,
    family=tiled_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_cumulative_lengths("cu_seqlens", "query"),
    reference=reference,
    cases=cases.cases(FlashMLAArguments),
    make_inputs=cases.make_inputs,
    lse="b h t",
    axes={"key_value": "b s r", "b_k": "b s c", "cu_seqlens": "m"},
)
FlashMLA.op = OP
