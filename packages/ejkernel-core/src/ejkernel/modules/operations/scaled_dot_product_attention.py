"""Scaled dot-product attention: the plain call of attention, with the arguments that most frameworks share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import flash_attention as flash_attention_cases
from ejkernel.modules.operations.cases import scaled_dot_product_attention as cases
from ejkernel.modules.operations.configuration.attention import ScaledDotProductAttentionConfig
from ejkernel.modules.operations.flash_attention import OP as FLASH_ATTENTION
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import conditions as flash_conditions
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import reference as flash_reference
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.lse import WithLse
from ejkernel.modules.operations.shared.shapes import got
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.types import MaskInfo


def resolve_bias(bias: Any, init_bias: Any) -> Any:
    """Returns the bias of a call: the given one, or else what `init_bias` makes.

    Raises:
        ValueError: `init_bias` cannot be called.
    """
    if init_bias is not None and not callable(init_bias):
        raise ValueError(f"init_bias: got {got(init_bias)}, wants a callable without arguments that returns the bias")
    return init_bias() if bias is None and init_bias is not None else bias


@document_options
def scaled_dot_product_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g v"],
    bias: Float[Array, "#b #h #t #s"] | None = None,
    cum_seqlens_q: Integer[Array, " n"] | None = None,
    cum_seqlens_k: Integer[Array, " n"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: ScaledDotProductAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | WithLse:
    """Computes softmax attention with the arguments of `jax.nn.dot_product_attention` (Vaswani et al. 2017,
    arXiv:1706.03762).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size. Query head h reads
    KV head `h // (H // Hk)`. Scores are `softmax_scale * <q, k> + bias`; the formula, term by term, is in
    `ejkernel.families.tiled_attention`. Memory is linear in the lengths, as in `flash_attention`, which also has
    sinks, soft caps and dropout.

    Over devices, batch, heads and queries can be split; keys and head size cannot.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk.
        value: [B, S, Hk, V], dtype of query.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores. Differentiable. Applies together with masks.
        cum_seqlens_q: Cumulative query lengths, int, starting at 0; never the lengths themselves. With B = 1, [N + 1]
            for N packed sequences that do not see each other and whose positions restart; with B > 1, [B + 1], row b
            holding one sequence followed by padding. May be traced; an eager call waits for the values and checks them.
            Sequences may be empty.
        cum_seqlens_k: The same for keys; None means those of the queries.
        mask_info: Mask, segments and positions; applies together with everything else.
        init_bias: Called without arguments for the bias where `bias` is None, when the call is made or traced.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        causal: Key position at most query position. Positions count from the first token of each side (top-left),
            unless `mask_info` gives them.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, T, H, V] in query's dtype. Rows with nothing to attend are 0, and so is their gradient.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import scaled_dot_product_attention

        query = jax.random.normal(jax.random.key(0), (1, 128, 8, 64))
        key = value = jax.random.normal(jax.random.key(1), (1, 128, 2, 64))
        output = scaled_dot_product_attention(query, key, value, causal=True, sliding_window=32)
        assert output.shape == (1, 128, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class ScaledDotProductAttentionArguments(ArgumentRecord, of=scaled_dot_product_attention):
    """The arguments of a call of `scaled_dot_product_attention`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", resolve_bias(self.bias, self.init_bias))
        object.__setattr__(self, "init_bias", None)  # a new lambda a call would compile every call
        checked = _as_flash(self)
        for name in ("softmax_scale", "causal", "sliding_window", "return_lse"):
            object.__setattr__(self, name, getattr(checked, name))


def _as_flash(args: ScaledDotProductAttentionArguments) -> FlashAttentionArguments:
    """Returns the same call of `flash_attention`."""
    return FlashAttentionArguments(
        query=args.query,
        key=args.key,
        value=args.value,
        bias=args.bias,
        cum_seqlens_q=args.cum_seqlens_q,
        cum_seqlens_k=args.cum_seqlens_k,
        mask_info=args.mask_info,
        softmax_scale=args.softmax_scale,
        dropout_prob=0.0,
        causal=args.causal,
        sliding_window=args.sliding_window,
        logits_soft_cap=None,
        normalize_output=True,
        precision=None,
        logits_dtype=jnp.float32,
        return_lse=args.return_lse,
    )


def validate(args: ScaledDotProductAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    validate_flash(_as_flash(args))


def lower(args: ScaledDotProductAttentionArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call."""
    return lower_flash(_as_flash(args))


def reference(args: ScaledDotProductAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    return flash_reference(_as_flash(args))


class ScaledDotProductAttention(Kernel[ScaledDotProductAttentionConfig, Array]):
    """Wraps `scaled_dot_product_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=ScaledDotProductAttentionArguments,
    family=tiled_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=lambda args: flash_conditions(_as_flash(args)),
    conventions=conventions.dense_sentences(),
    reference=reference,
    cases=cases.cases(ScaledDotProductAttentionArguments),
    make_inputs=flash_attention_cases.make_inputs,
    lse=FLASH_ATTENTION.lse,
    axes={name: axes for name, axes in FLASH_ATTENTION.axes.items() if name not in ("softmax_aux", "block_tables")},
)
ScaledDotProductAttention.op = OP
