"""DeepSeek sparse attention: the indexer, and latent attention to the tokens that it selects."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ejkernel.families import lightning_indexer as indexer_family
from ejkernel.families import token_sparse_attention as family
from ejkernel.modules.operations.cases import deepseek_attn as cases
from ejkernel.modules.operations.configs import DeepSeekAttentionConfig
from ejkernel.modules.operations.lightning_indexer import LightningIndexerArguments, lightning_indexer
from ejkernel.modules.operations.lightning_indexer import lower as lower_indexer
from ejkernel.modules.operations.shared.latent_inputs import (
    check_self_attention_sizes,
    set_canonical_values,
    with_accumulator_dtype,
)
from ejkernel.modules.operations.shared.repeated import check_config_agrees_with_call
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.invariant_rows import compute_rows, product_tile_rows
from ejkernel.ops.model import Op
from ejkernel.ops.nested import platform_of_nested_call
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning.precision import product_precision


@document_options
def deepseek_attn(
    query: Float[Array, "b t h d"],
    key_value: Float[Array, "b t r"],
    w_kc: Float[Array, "r g n"],
    w_vc: Float[Array, "r g v"],
    query_index: Float[Array, "b t j e"],
    key_index: Float[Array, "b t e"],
    index_weights: Float[Array, "b t j"],
    b_q: Float[Array, "b t c"] | None = None,
    b_k: Float[Array, "b t c"] | None = None,
    *,
    index_topk: int = 2048,
    softmax_scale: float | None = None,
    index_softmax_scale: float | None = None,
    causal: bool = True,
    platform: str | None = None,
    cfg: DeepSeekAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"]:
    """Computes latent self-attention to the tokens that an indexer selects (DeepSeek-V3.2), in memory linear in T.

    Shape letters: B batch, T tokens, H query heads, Hk KV heads, R latent size, Dn and Dr sizes of a key without and
    with rotary position, Dv value size, Hi indexer heads, Di their size. Query head h reads KV head `h // (H // Hk)`.

    The result is that of `flash_mla` with the same arrays, scale and `causal`, and with a softmax over the `index_topk`
    tokens that `lightning_indexer` selects for each query from `query_index`, `key_index` and `index_weights`. Scores
    have one of the three forms of `flash_mla`. All arrays are already rotated: the call applies no rotary embedding. It
    runs in the *absorbed* form: queries are multiplied by `w_kc`, `token_sparse_attention`
    attends to the latent vectors themselves, and `w_vc` multiplies what it returns.

    What is selected has no gradient, so `query_index`, `key_index` and `index_weights` are constants to
    differentiation. To train the indexer, call `lightning_indexer` and differentiate `lightning_indexer_loss` of its
    results. `platform` is that of the attention, and of the indexer where the platform has one; otherwise dispatch
    chooses the indexer, and `explain` says which. `cfg` is that of the attention.

    Calls have as many queries as tokens, and no packing, window, sinks or lse: for these, and to decode, call
    `lightning_indexer` and `token_sparse_attention`.

    Over devices, batch, heads and the query's tokens can be split. The indexer runs before the split, as XLA partitions
    it; to split it as well, call the two operations, each with its specs.

    Args:
        query: [B, T, H, Dq] float16, bfloat16, float32 or float64; Dq is Dn, or Dn + Dr with b_k alone.
        key_value: [B, T, R] latent vectors, dtype of query.
        w_kc: [R, Hk, Dn], dtype of query; H is a multiple of Hk.
        w_vc: [R, Hk, Dv], dtype of query.
        query_index: [B, T, Hi, Di] floating, queries of the indexer.
        key_index: [B, T, Di], dtype of query_index.
        index_weights: [B, T, Hi] floating, weights of the indexer's heads, with the model's own factor: DeepSeek-V3.2
            multiplies its projection by `Hi ** -0.5`.
        b_q: [B, T, Dr], dtype of query; only with b_k.
        b_k: [B, T, Dr], dtype of query.
        index_topk: How many tokens a query attends to, at least 1; all that it may read where these are fewer.
        softmax_scale: Factor on the scores; None means one over the root of a key's size, Dn or Dn + Dr. A model with
            YaRN passes its own: DeepSeek-V3.2 multiplies by `(0.1 * mscale * log(rope_factor) + 1) ** 2`.
        index_softmax_scale: Factor on the products of the indexer; None means `Di ** -0.5`.
        causal: Key position at most query position, for the indexer and so for attention.

    Returns:
        [B, T, H, Dv] in query's dtype. Differentiable in query, key_value, w_kc, w_vc, b_q and b_k.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import deepseek_attn, flash_mla

        keys = jax.random.split(jax.random.key(0), 8)
        query = jax.random.normal(keys[0], (1, 64, 8, 32 + 16))  # [nope | rope]
        latent, k_rope = jax.random.normal(keys[1], (1, 64, 48)), jax.random.normal(keys[2], (1, 64, 16))
        w_kc, w_vc = jax.random.normal(keys[3], (48, 8, 32)), jax.random.normal(keys[4], (48, 8, 40))
        indexer = [jax.random.normal(k, (1, 64, *shape)) for k, shape in zip(keys[5:], ((4, 32), (32,), (4,)))]
        output = deepseek_attn(query, latent, w_kc, w_vc, *indexer, None, k_rope, index_topk=16)
        dense = flash_mla(query, latent, w_kc, w_vc, None, k_rope, causal=True)
        assert jnp.allclose(output[:, :16], dense[:, :16], atol=1e-3)  # these have at most 16 tokens to select
        ```
    """
    return run_operation(OP, locals())


class DeepSeekAttentionArguments(ArgumentRecord, of=deepseek_attn):
    """The arguments of a call of `deepseek_attn`."""

    def __post_init__(self) -> None:
        scales = {name: getattr(self, name) for name in ("softmax_scale", "index_softmax_scale")}
        set_canonical_values(
            self,
            index_topk=as_count("index_topk", self.index_topk, minimum=1),
            causal=as_flag("causal", self.causal),
            **{name: as_number(name, scale) for name, scale in scales.items() if scale is not None},
        )


def validate(args: DeepSeekAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes = check_self_attention_sizes(args)
    for name, axes in (("query_index", "B T Hi Di"), ("key_index", "B T Di"), ("index_weights", "B T Hi")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_not_empty("query_index", args.query_index, "B T Hi Di", "Hi Di")
    check_same_dtype({"query_index": args.query_index, "key_index": args.key_index})


def _indexer_call(args: DeepSeekAttentionArguments) -> LightningIndexerArguments:
    """Returns the call of the indexer. What it selects has no gradient."""
    query, key, weights = lax.stop_gradient((args.query_index, args.key_index, args.index_weights))
    return LightningIndexerArguments(
        query=query,
        key=key,
        weights=weights,
        top_k=args.index_topk,
        softmax_scale=args.index_softmax_scale,
        causal=args.causal,
    )


def _select_tokens(args: LightningIndexerArguments) -> jax.Array:
    """Returns the selected tokens, from the call's platform where it has an indexer, else from dispatch's choice."""
    options = {"top_k": args.top_k, "softmax_scale": args.softmax_scale, "causal": args.causal}
    platform = platform_of_nested_call("lightning_indexer", args)
    return lightning_indexer(args.query, args.key, args.weights, **options, platform=platform)[0]


def _select_tokens_in_plain_jnp(args: LightningIndexerArguments) -> jax.Array:
    """Returns the selected tokens, in plain jnp."""
    return indexer_family.reference(lower_indexer(args))[0][0]


def lower(args: DeepSeekAttentionArguments) -> family.TokenSparseAttention:
    """Returns the record of a call in the absorbed form: one KV head, whose values are the latent vectors."""
    return _lower_with_selection(args, _select_tokens)


def _lower_with_selection(
    args: DeepSeekAttentionArguments, select_tokens: Callable[[LightningIndexerArguments], jax.Array]
) -> family.TokenSparseAttention:
    size, latent_size = args.w_kc.shape[2], args.key_value.shape[2]
    query, key = _absorb_key_weights(args.query[..., :size], args.w_kc), args.key_value
    if args.b_k is not None:
        size += args.b_k.shape[2]
        heads = args.query.shape[2]
        rotary = args.query[..., args.w_kc.shape[2] :] if args.b_q is None else _repeat_for_heads(args.b_q, heads)
        query, key = jnp.concatenate([query, rotary], axis=-1), jnp.concatenate([key, args.b_k], axis=-1)
    return family.TokenSparseAttention(
        query=query,
        key=key[:, :, None],
        indices=select_tokens(_indexer_call(args))[:, :, None],
        softmax_scale=size**-0.5 if args.softmax_scale is None else args.softmax_scale,
        value_size=latent_size,
    )


def _repeat_for_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns [B, T, n] -> [B, T, heads, n]."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], heads, x.shape[2]))


def _absorb_key_weights(query: jax.Array, w_kc: jax.Array) -> jax.Array:
    """Returns queries [B, T, H, Dn] multiplied by the weights of their KV heads, [B, T, H, R] in their dtype."""
    return _multiply_by_kv_head_weights("btghn,rgn->btghr", query, w_kc)


def _multiply_by_kv_head_weights(einsum_spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the products of x [B, T, H, n] with the weights of its KV heads, [B, T, H, m] in x's dtype."""
    multiply = functools.partial(_product_with_heads, einsum_spec)
    tile_rows = product_tile_rows(x.shape[2] // weights.shape[1])
    return compute_rows(multiply, (x,), (weights,), axes=2, tile_rows=tile_rows)


def _product_with_heads(einsum_spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    rows, tokens, heads, size = x.shape
    grouped = x.reshape(rows, tokens, weights.shape[1], heads // weights.shape[1], size)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.einsum(
        einsum_spec, grouped, weights, precision=product_precision(x.dtype), preferred_element_type=wide
    )
    return product.reshape(rows, tokens, heads, product.shape[-1]).astype(x.dtype)


def finish(args: DeepSeekAttentionArguments, output: jax.Array) -> jax.Array:
    """Returns the values of attention's averages of latent vectors, [B, T, H, Dv]."""
    return _multiply_by_kv_head_weights("btghr,rgv->btghv", output, args.w_vc)


def reference(args: DeepSeekAttentionArguments) -> jax.Array:
    """Returns the operation's meaning in plain jnp; what is absorbed is not rounded to the arguments' dtype."""
    wide = with_accumulator_dtype(args)
    with jax.default_matmul_precision("highest"):
        output = finish(wide, family.reference(_lower_with_selection(wide, _select_tokens_in_plain_jnp))[0])
    return output.astype(args.query.dtype)


def configure(args: DeepSeekAttentionArguments, cfg: DeepSeekAttentionConfig | None) -> DeepSeekAttentionConfig | None:
    """Returns the call's own configuration, if it repeats the call's arguments."""
    check_config_agrees_with_call(cfg, index_topk=args.index_topk)
    return cfg


class DeepSeekAttention(Kernel[DeepSeekAttentionConfig, Array]):
    """Wraps `deepseek_attn` in an object that an `Executor` can call."""


OP = Op(
    arguments=DeepSeekAttentionArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    finish=finish,
    reference=reference,
    configure=configure,
    cases=cases.cases(DeepSeekAttentionArguments),
    make_inputs=cases.make_inputs,
    output="b t h v",
    axes={"key_value": "b s r", "key_index": "b s e", "b_k": "b s c"},
)
DeepSeekAttention.op = OP
