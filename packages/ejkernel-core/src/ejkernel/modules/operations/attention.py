"""Attention with its weights: the output and the matrix that made it, to look at."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ejkernel.families import attention_weights
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import attention as cases
from ejkernel.modules.operations.cases import flash_attention as flash_attention_cases
from ejkernel.modules.operations.configs import BwdParams, FlashAttentionConfig, FwdParams
from ejkernel.modules.operations.configuration.attention import AttentionConfig
from ejkernel.modules.operations.flash_attention import OP as FLASH_ATTENTION
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.scaled_dot_product_attention import resolve_bias
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.shapes import (
    as_dropout_seed,
    as_flag,
    as_float_dtype,
    as_number,
    as_window,
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
def attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g v"],
    bias: Float[Array, "#b heads #t #s"] | None = None,
    dropout_rng: int | PRNGKeyArray | Integer[Array, ""] | Integer[Array, " words"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = None,
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_weights: bool = True,
    platform: str | None = None,
    cfg: AttentionConfig | FlashAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "b t h v"], Float[Array, "b h t s"]] | Float[Array, "b t h v"]:
    """Computes softmax attention, and returns its weights too (Vaswani et al. 2017, arXiv:1706.03762).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size. Query head h reads
    KV head `h // (H // Hk)`. The formula, term by term, is in `ejkernel.families.tiled_attention`. The weights have
    T * S numbers per head, so memory is quadratic in the lengths; without them the call is one of `flash_attention`.

    Over devices, batch, heads and queries can be split; keys and head size cannot.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query unless `dtype` is given; H is a multiple of Hk.
        value: [B, S, Hk, V], as above.
        bias: [B|1, H|Hk|1, T|1, S|1] floating, added to the scaled scores, before the soft cap; one for a KV head
            counts for all query heads that read it. Differentiable. Applies together with masks.
        dropout_rng: JAX key, or integer of which the low 32 bits count; may be traced. None means 0, with one
            warning a process. The same one drops the same weights on every backend, in both passes.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        mask_info: Mask, segments and positions; applies together with everything else.
        init_bias: Called without arguments for the bias where `bias` is None, when the call is made or traced.
        deterministic: True drops nothing, whatever `dropout_prob`.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        dtype: Floating dtype that query, key and value are cast to, and that of the results; None means query's.
        softmax_dtype: Floating dtype that scores are rounded to before the softmax, whose sums are float32; None,
            float32 and wider round nothing.
        dropout_prob: Probability in [0, 1) of dropping a softmax weight, each on its own; kept ones are scaled by
            `1 / (1 - p)`.
        causal: Key position at most query position. Positions count from the first token of each side (top-left),
            unless `mask_info` gives them.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        return_weights: False leaves the weights out, and hands the call to the kernels of `flash_attention`.

    Returns:
        The output [B, T, H, V] and the weights [B, H, T, S] that made it, after dropout; the weights of a row sum to at
        most 1 before it. The output alone without `return_weights`. Rows with nothing to attend are 0, and so is
        their gradient.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import attention

        query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
        output, weights = attention(query, key, value, causal=True)
        assert output.shape == (1, 16, 4, 8) and weights.shape == (1, 4, 16, 16)
        assert jnp.allclose(weights.sum(axis=-1), 1, atol=1e-6)
        ```
    """
    return run_operation(OP, locals())


class AttentionArguments(ArgumentRecord, of=attention):
    """The arguments of a call of `attention`."""

    def __post_init__(self) -> None:
        scale, cap, dtype, softmax_dtype = self.softmax_scale, self.logits_soft_cap, self.dtype, self.softmax_dtype
        canonical = {
            "bias": resolve_bias(self.bias, self.init_bias),
            "init_bias": None,  # a new lambda a call would compile every call
            "deterministic": as_flag("deterministic", self.deterministic),
            "softmax_scale": None if scale is None else as_number("softmax_scale", scale),
            "logits_soft_cap": None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            "dtype": None if dtype is None else as_float_dtype("dtype", dtype),
            "softmax_dtype": None if softmax_dtype is None else as_float_dtype("softmax_dtype", softmax_dtype),
            "dropout_prob": as_number("dropout_prob", self.dropout_prob, minimum=0, less_than=1),
            "causal": as_flag("causal", self.causal),
            "sliding_window": as_window("sliding_window", self.sliding_window),
            "return_weights": as_flag("return_weights", self.return_weights),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dropout_rng", as_dropout_seed("dropout_rng", self.dropout_rng, self.has_dropout))

    @property
    def has_dropout(self) -> bool:
        """Returns whether weights are dropped."""
        return self.dropout_prob > 0 and not self.deterministic


def validate(args: AttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    _check_call(args)
    jax.eval_shape(lambda args: validate_flash(_as_flash(args)), args)


def _check_call(args: AttentionArguments) -> None:
    """Checks the arguments without which `flash_attention` cannot be called."""
    for name, axes in (("query", "B T H D"), ("key", "B S Hk D"), ("value", "B S Hk V")):
        check_shape(name, getattr(args, name), axes, {})
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    if args.dropout_rng is not None:
        _check_rng(args.dropout_rng)


def _check_rng(rng: Any) -> None:
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    dtype, shape = getattr(rng, "dtype", None), jnp.shape(rng)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or (shape and (dtype, shape) != (jnp.uint32, words)):
        raise ValueError(f"dropout_rng: got {got(rng)}, wants a JAX key, an int, or an integer array of shape ()")


def _as_flash(args: AttentionArguments) -> FlashAttentionArguments:
    """Returns the same call of `flash_attention`, which has no weights to return."""
    bias, heads, kv_heads = args.bias, args.query.shape[2], args.key.shape[2]
    if bias is not None and bias.ndim == 4 and bias.shape[1] == kv_heads > 1 and heads % kv_heads == 0:
        bias = jnp.repeat(bias, heads // kv_heads, axis=1)
    query, key, value = (x if args.dtype is None else x.astype(args.dtype) for x in (args.query, args.key, args.value))
    return FlashAttentionArguments(
        query=query,
        key=key,
        value=value,
        bias=bias,
        softmax_aux=args.softmax_aux,
        mask_info=args.mask_info,
        softmax_scale=args.softmax_scale,
        dropout_prob=args.dropout_prob if args.has_dropout else 0.0,
        causal=args.causal,
        dropout_seed=_seed_from_rng(args.dropout_rng) if args.has_dropout else None,
        sliding_window=args.sliding_window,
        logits_soft_cap=args.logits_soft_cap,
        normalize_output=True,
        precision=None,
        logits_dtype=jnp.float32 if args.softmax_dtype is None else args.softmax_dtype,
    )


def _seed_from_rng(rng: Any) -> jax.Array:
    """Returns the project's dropout seed, uint32, from an integer or a key."""
    if jnp.issubdtype(rng.dtype, jnp.integer) and not jnp.ndim(rng):
        return jnp.asarray(rng).astype(jnp.uint32)
    return jax.random.bits(rng, (), jnp.uint32)


def lower(args: AttentionArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call."""
    return lower_flash(_as_flash(args))


def _config_with_output_tiles(cfg: AttentionConfig) -> FlashAttentionConfig:
    """Returns the configuration of `flash_attention` that has the tiles of the output, in both passes.

    Raises:
        ValueError: The configuration has tiles of weights.
    """
    for name in ("weights_block_q", "weights_block_k"):
        if getattr(cfg, name) is not None:
            raise ValueError(f"cfg: got {name}={getattr(cfg, name)} with return_weights=False, wants None")
    tiles: Any = {"q_blocksize": cfg.block_q, "kv_blocksize": cfg.block_k}
    tiles |= {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages}
    any_set = any(value is not None for value in tiles.values())
    parts: Any = {"fwd_params": FwdParams(**tiles), "bwd_params": BwdParams(**tiles)} if any_set else {}
    return FlashAttentionConfig(platform=cfg.platform, backend=cfg.backend, **parts)


def _route_without_weights(args: AttentionArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    """Routes a call with `return_weights=False` to `flash_attention`."""
    if args.return_weights:
        return OP, args, options
    _check_call(args)
    cfg, specs = options["cfg"], options["in_specs"]
    if isinstance(cfg, AttentionConfig):
        cfg = _config_with_output_tiles(cfg)
    if isinstance(specs, tuple | list) and len(specs) > 4 and not isinstance(specs, jax.sharding.PartitionSpec):
        specs = (*specs[:4], None, None, *specs[5:])  # cumulative lengths for the key of dropout
    return FLASH_ATTENTION, _as_flash(args), {**options, "cfg": cfg, "in_specs": specs}


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns the inputs of `flash_attention_cases.make_inputs`, with a `dropout_rng`."""
    inputs = flash_attention_cases.make_inputs(dataclasses.replace(args, dropout_rng=None), key)
    rng = args.dropout_rng
    if rng is None:
        return inputs
    is_key = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    return dataclasses.replace(inputs, dropout_rng=jax.random.key(0) if is_key else jnp.zeros(rng.shape, rng.dtype))


class Attention(Kernel[AttentionConfig, Any]):
    """Wraps `attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=AttentionArguments,
    family=attention_weights.FAMILY,
    validate=validate,
    lower=lower,
    conventions=conventions.dense_sentences(),
    cases=cases.cases(AttentionArguments),
    make_inputs=make_inputs,
    route=_route_without_weights,
    axes={"bias": "b h t s", "dropout_rng": "c", "softmax_aux": "h n"},
)
Attention.op = OP
