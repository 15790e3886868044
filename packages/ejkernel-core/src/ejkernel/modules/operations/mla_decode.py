"""Decoding with multi-head latent attention: the query goes to the latent cache, not the cache to the heads."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import mla_decode as cases
from ejkernel.modules.operations.configuration.latent import MLADecodeConfig
from ejkernel.modules.operations.flash_attention import flash_call
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.shared.conditions import have_ranks, value_range_condition
from ejkernel.modules.operations.shared.latent_inputs import (
    check_latent_sizes,
    check_lengths,
    check_query_size,
    set_canonical_values,
    with_accumulator_dtype,
)
from ejkernel.modules.operations.shared.lse import WithLse, split_output_and_lse, with_lse
from ejkernel.modules.operations.shared.shapes import as_flag, as_number, as_window, check_dtype, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.invariant_rows import compute_rows, product_tile_rows
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.precision import product_precision
from ejkernel.types import MaskInfo


@document_options
def mla_decode(
    query: Float[Array, "b h d"],
    latent_cache: Float[Array, "b s r"],
    rope_cache: Float[Array, "b s c"] | None,
    w_kc: Float[Array, "r g n"],
    w_vc: Float[Array, "r g v"],
    lengths: Integer[Array, " b"],
    *,
    softmax_scale: float | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: MLADecodeConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b h v"] | WithLse:
    """Computes absorbed latent attention of one query per row (DeepSeek-V2, 2024, arXiv:2405.04434).

    The last row of a causal `flash_mla` of form (b), up to rounding, without its keys and values: with the query
    `[q_nope | q_rope]` of head h, and KV head g = `h // (H // Hk)`,

        a_h = w_kc[:, g] @ q_nope                                     the query, absorbed
        p   = softmax(scale * (a_h . latent_j + q_rope . rope_j))     over the cached tokens j
        o_h = (sum_j p_j latent_j) @ w_vc[:, g]

    which is attention of all heads to a single KV head of size R + Dr whose values are the latent vectors: neither
    [B, S, Hk, Dn] keys nor [B, S, Hk, Dv] values exist. Serving libraries call it MLA decode.

    Shape letters: B batch, S tokens of a cache, H query heads, Hk KV heads, R latent size, Dn and Dr sizes of a key
    without and with rotary position, Dv value size.

    Over devices, batch and query heads can be split.

    Args:
        query: [B, H, Dn + Dr] (Dn without rotary part) float16, bfloat16, float32 or float64.
        latent_cache: [B, S, R], dtype of query; or [B, S, R + Dr], the two caches as one array: XLA joins two in every
            call, which takes a copy.
        rope_cache: [B, S, Dr], dtype of query. None where latent_cache holds both, or keys have no rotary part.
        w_kc: [R, Hk, Dn], dtype of query; H is a multiple of Hk.
        w_vc: [R, Hk, Dv], dtype of query.
        lengths: [B] int, cached tokens of each row, 0 to S, the query's own among them: it sits at `length - 1`. May be
            traced; an eager call waits for the values and checks them.
        softmax_scale: Factor on the scores; None means `(Dn + Dr) ** -0.5`.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`, inclusive, as in `flash_mla`: keys from
            `q - left` on.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, H, Dv] in query's dtype. Rows of length 0 are 0.
        With `return_lse`, lse [B, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import mla_decode

        keys = jax.random.split(jax.random.key(0), 4)
        query = jax.random.normal(keys[0], (2, 8, 32 + 16))  # [nope | rope]
        cache = jax.random.normal(keys[1], (2, 256, 64 + 16))  # [latent | rope]
        w_kc, w_vc = jax.random.normal(keys[2], (64, 8, 32)), jax.random.normal(keys[3], (64, 8, 40))
        output = mla_decode(query, cache, None, w_kc, w_vc, jnp.array([200, 3]))
        assert output.shape == (2, 8, 40)
        ```
    """
    return run_operation(OP, locals())


class MLADecodeArguments(ArgumentRecord, of=mla_decode):
    """The arguments of a call of `mla_decode`."""

    def __post_init__(self) -> None:
        scale, cap = self.softmax_scale, self.logits_soft_cap
        set_canonical_values(
            self,
            return_lse=as_flag("return_lse", self.return_lse),
            softmax_scale=None if scale is None else as_number("softmax_scale", scale),
            logits_soft_cap=None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            sliding_window=as_window("sliding_window", self.sliding_window),
        )
        # The call goes on under a trace, where no values can be seen.
        if getattr(self.latent_cache, "ndim", 0) == 3:
            check_lengths("lengths", self.lengths, self.latent_cache.shape[1])


flash_mla_decode = mla_decode


def validate(args: MLADecodeArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    latent = "B S R" if args.rope_cache is not None else "B S R+Dr"
    required = {"query": "B H Dq", "latent_cache": latent, "w_kc": "R Hk Dn", "w_vc": "R Hk Dv"}
    sizes = check_latent_sizes(args, required, {"rope_cache": "B S Dr"})
    sizes.setdefault("Dr", sizes.get("R+Dr", 0) - sizes["R"])
    if sizes["Dr"] < 0:
        raise ValueError(f"latent_cache: got shape {args.latent_cache.shape}, wants [B, S, R={sizes['R']}] or more")
    check_query_size(sizes, True)
    check_shape("lengths", args.lengths, "B", sizes)
    check_dtype("lengths", args.lengths, jnp.integer, "an integer dtype")
    row = jax.ShapeDtypeStruct((sizes["B"], 1, sizes["H"], sizes["Dq"]), args.query.dtype)
    # What is said of sinks there holds here.
    validate_flash(flash_call(query=row, key=row, value=row, softmax_aux=args.softmax_aux))


def conditions(args: MLADecodeArguments) -> Iterable[Condition]:
    """Yields the condition that no sequence is longer than the cache. The argument record has already checked values
    that are not traced.
    """
    if have_ranks(args, latent_cache=3, lengths=1):
        yield from value_range_condition(
            "lengths", args.lengths, 0, args.latent_cache.shape[1], "lengths", traced_only=True
        )


def lower(args: MLADecodeArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call: absorbed queries, and the cache as one KV head."""
    size = args.w_kc.shape[2]
    nope, rope = args.query[..., :size], args.query[..., size:]
    absorbed = _multiply_by_kv_head_weights("bghn,rgn->bghr", nope, args.w_kc).astype(rope.dtype)
    query = jnp.concatenate([absorbed, rope], axis=-1)
    cache = args.latent_cache
    both_caches = cache if args.rope_cache is None else jnp.concatenate([cache, args.rope_cache], axis=-1)
    lengths = args.lengths.astype(jnp.int32)[:, None]
    token = jnp.arange(cache.shape[1], dtype=jnp.int32)
    return lower_flash(
        flash_call(
            query=query[:, None],
            key=both_caches[:, :, None],
            value=cache[:, :, None],
            softmax_aux=args.softmax_aux,
            mask_info=MaskInfo(
                _q_segment_ids=jnp.zeros_like(lengths),
                _kv_segment_ids=jnp.where(token < lengths, 0, -1),
                q_positions=lengths - 1,
            ),
            softmax_scale=args.query.shape[-1] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
            sliding_window=args.sliding_window,
            logits_soft_cap=args.logits_soft_cap,
        )
    )


def finish(args: MLADecodeArguments, value: Any) -> Any:
    """Returns what the public function returns, from latent outputs [B, 1, H, R or R + Dr]."""
    output, lse = split_output_and_lse(args, value)
    latent = output[:, 0, :, : args.w_vc.shape[0]]
    output = _multiply_by_kv_head_weights("bghr,rgv->bghv", latent, args.w_vc).astype(args.query.dtype)
    return with_lse(args, output, None if lse is None else lse[:, :, 0])


def _multiply_by_kv_head_weights(einsum_spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the products of x [B, H, n] with the weights of its KV heads, [B, H, m] in the accumulator's dtype."""
    multiply = functools.partial(_product_with_heads, einsum_spec)
    return compute_rows(multiply, (x,), (weights,), tile_rows=product_tile_rows(x.shape[1] // weights.shape[1]))


def _product_with_heads(einsum_spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    (batch, heads, size), kv_heads = x.shape, weights.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads, size)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    exact: Any = {"precision": product_precision(x.dtype), "preferred_element_type": wide}
    product = jnp.einsum(einsum_spec, grouped, weights, **exact)
    return product.reshape(batch, heads, product.shape[-1])


def reference(args: MLADecodeArguments) -> Any:
    """Returns the operation's meaning in plain jnp; absorbed queries and latent outputs are not rounded
    to their dtype.
    """
    wide = with_accumulator_dtype(args)
    with jax.default_matmul_precision("highest"):
        output, residuals = tiled_attention.reference(lower(wide))
        output, lse = split_output_and_lse(args, finish(wide, with_lse(args, output, residuals.lse)))
    return with_lse(args, output.astype(args.query.dtype), lse)


class MLADecode(Kernel[MLADecodeConfig, Array]):
    """Wraps `mla_decode` in an object that an `Executor` can call."""


OP = Op(
    padding_only=True,
    single_query=True,
    arguments=MLADecodeArguments,
    family=tiled_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    reference=reference,
    cases=cases.cases(MLADecodeArguments),
    make_inputs=cases.make_inputs,
    finish=finish,
    output="b h v",
    lse="b h",
)
MLADecode.op = OP
