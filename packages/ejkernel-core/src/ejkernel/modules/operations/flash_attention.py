"""Flash attention: exact softmax attention in memory linear in the sequence length."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import flash_attention as cases
from ejkernel.modules.operations.configs import FlashAttentionConfig
from ejkernel.modules.operations.paged_keys import page_conditions, paged_call
from ejkernel.modules.operations.shared import conventions, dense_arguments
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.modules.operations.shared.recurrences import rank
from ejkernel.modules.operations.shared.shapes import (
    as_dropout_seed,
    as_flag,
    as_float_dtype,
    as_number,
    as_precision,
    as_window,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.modules.operations.shared.sinks import check_sinks, sink_logits
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning import packing
from ejkernel.types import MaskInfo
from ejkernel.types.integers import clamp_positions, exact_segment_ids
from ejkernel.types.pair_functions import PairFunction


@document_options
def flash_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g v"],
    bias: Float[Array, "#b #h #t #s"] | None = None,
    cum_seqlens_q: Integer[Array, " n"] | None = None,
    cum_seqlens_k: Integer[Array, " n"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    block_tables: Integer[Array, "rows k"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: Bool[Array, "#b #h #t #s"]
    | Integer[Array, "#b #h #t #s"]
    | Bool[Array, "#b s"]
    | Integer[Array, "#b s"]
    | None = None,
    alibi_slopes: Float[Array, " h"] | Float[Array, "#b h"] | None = None,
    relative_bias: Float[Array, "h r"] | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | Integer[Array, ""] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: FlashAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | WithLse:
    """Computes softmax attention tile by tile (Dao et al. 2022, arXiv:2205.14135).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size. Query head h reads
    KV head `h // (H // Hk)`. The formula, term by term, is in `ejkernel.families.tiled_attention`.

    Over devices, batch, heads and queries can be split; keys and head size cannot.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk.
        value: [B, S, Hk, V], dtype of query.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores before the soft cap; -inf masks. Differentiable.
        cum_seqlens_q: Cumulative query lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each
            other and whose positions restart; with B > 1, [B + 1], row b holding one sequence followed by padding. May
            be traced; an eager call waits for the values and checks them. Sequences may be empty.
        cum_seqlens_k: The same for keys; None means those of the queries.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        block_tables: [B, max_blocks] int: key and value are pages [P, S, Hk, D] of a cache, of which row b reads those
            listed, as many tokens as `cum_seqlens_k` gives it, or all. The call is one of `unified_attention`: a query
            sits at the end of its sequence, and queries of several sequences may be packed by `cum_seqlens_q`.
        mask_info: Mask, segments and positions; applies together with everything else.
        attention_mask: [B|1, H|1, T|1, S|1], or [B|1, S] for padding of keys alone: True (or nonzero) attends. Applies
            together with everything else.
        alibi_slopes: [H] or [B|1, H] floating slopes m of ALiBi, the term `-m |k - q|` added to the scaled scores
            before the soft cap, k and q the positions. Needs no bias in memory. Has no gradient.
        relative_bias: [H, 2 R + 1] floating, added to the scaled scores before the soft cap: entry
            `R + clip(j - i, -R, R)` for query i and key j, as T5 has it for each bucket of distances. Needs no bias in
            memory. Positions are indices: not with `mask_info` that gives positions, or with `cum_seqlens_k`.
            Differentiable.
        score_mod: `(score, b, h, q_idx, k_idx) -> score`, a function of scalars that replaces each score after the soft
            cap. It may close over arrays, traced or not, which are differentiable; -inf masks. The arguments are
            indices of batch row, query head, query and key in the whole call, not positions.
        mask_mod: `(b, h, q_idx, k_idx) -> bool`, True where a pair attends; applies together with everything else. It
            may close over arrays. Tiles without an attending pair are skipped.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        dropout_prob: Probability in [0, 1) of dropping a softmax weight; kept ones are scaled by `1 / (1 - p)`.
        causal: Key position at most query position. Positions count from the first token of each side (top-left),
            unless `mask_info` gives them.
        dropout_seed: Integer, of which the low 32 bits count; may be traced. None means 0, with one warning a process.
            The same seed drops the same weights on every backend, in both passes.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        normalize_output: False returns the softmax numerator relative to the row's largest score, without sinks.
        precision: `jax.lax.Precision`, or its name, of the matrix products; means what it means to JAX on the device.
            None takes all digits of float32 and wider inputs, unless `jax.default_matmul_precision` says otherwise.
        logits_dtype: Floating dtype that scores are rounded to before the softmax; float32 and wider round nothing.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, T, H, V] in query's dtype. Rows with nothing to attend are 0, and so is their gradient.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention

        query = jax.random.normal(jax.random.key(0), (1, 128, 8, 64))
        key = value = jax.random.normal(jax.random.key(1), (1, 128, 2, 64))
        output = flash_attention(query, key, value, causal=True)
        assert output.shape == (1, 128, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class FlashAttentionArguments(ArgumentRecord, of=flash_attention):
    """The arguments of a call of `flash_attention`."""

    def __post_init__(self) -> None:
        scale, cap = self.softmax_scale, self.logits_soft_cap
        dropout = as_number("dropout_prob", self.dropout_prob, minimum=0, less_than=1)
        canonical = {
            "return_lse": as_flag("return_lse", self.return_lse),
            "softmax_scale": None if scale is None else as_number("softmax_scale", scale),
            "dropout_prob": dropout,
            "causal": as_flag("causal", self.causal),
            "dropout_seed": as_dropout_seed("dropout_seed", self.dropout_seed, dropout > 0),
            "sliding_window": as_window("sliding_window", self.sliding_window),
            "logits_soft_cap": None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            "normalize_output": as_flag("normalize_output", self.normalize_output),
            "precision": as_precision("precision", self.precision),
            "logits_dtype": as_float_dtype("logits_dtype", self.logits_dtype),
            **pair_functions(self.score_mod, self.mask_mod, self.query),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)
        # The call goes on under a trace, where no values can be seen.
        for name, side in (("cum_seqlens_q", self.query), ("cum_seqlens_k", self.key)):
            lengths = getattr(self, name)
            if lengths is not None and getattr(side, "ndim", 0) == 4 and self.block_tables is None:
                check_cumulative_lengths(name, lengths, *side.shape[:2])


def flash_call(**fields: Any) -> FlashAttentionArguments:
    """Returns a call of `flash_attention`, by which other operations say what they have in common with it."""
    return FlashAttentionArguments(**fields)


def validate(args: FlashAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("query", "B T H D"), ("key", "B S Hk D"), ("value", "B S Hk V")):
        check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("query", args.query, "B T H D", "T H D")
    check_not_empty("key", args.key, "B S Hk D", "S Hk")
    check_not_empty("value", args.value, "B S Hk V", "V")
    check_dtype("query", args.query, jnp.floating, "a floating dtype")
    check_same_dtype({"query": args.query, "key": args.key, "value": args.value})
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"key: got shape {args.key.shape} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )
    if args.bias is not None:
        check_shape("bias", args.bias, "B H T S", sizes, broadcast="B H T S")
        check_dtype("bias", args.bias, jnp.floating, "a floating dtype")
    if args.attention_mask is not None:
        keys_alone = rank(args.attention_mask) == 2
        axes = "B S" if keys_alone else "B H T S"
        check_shape("attention_mask", args.attention_mask, axes, sizes, broadcast="B" if keys_alone else axes)
        if args.attention_mask.dtype != jnp.bool_:
            check_dtype("attention_mask", args.attention_mask, jnp.integer, "bool or an integer dtype")
    if args.alibi_slopes is not None:
        axes = "B H" if rank(args.alibi_slopes) == 2 else "H"
        check_shape("alibi_slopes", args.alibi_slopes, axes, sizes, broadcast="B")
        check_dtype("alibi_slopes", args.alibi_slopes, jnp.floating, "a floating dtype")
    dense_arguments.check_relative_bias(args, sizes)
    check_sinks(args.softmax_aux, sizes["H"])
    dense_arguments.check_cum_seqlens(args, sizes)
    dense_arguments.check_mask_info(args.mask_info, sizes)
    dense_arguments.check_dropout_seed(args)


def conditions(args: FlashAttentionArguments) -> Iterable[Condition]:
    """Yields the conditions that cumulative lengths fit the arrays or the pages of a cache."""
    if not have_ranks(args, query=4, key=4):
        return
    if args.block_tables is not None:
        yield from page_conditions(args)
        return
    for name, array in (("cum_seqlens_q", args.query), ("cum_seqlens_k", args.key)):
        if getattr(args, name) is not None:
            yield from cumulative_length_conditions(name, getattr(args, name), *array.shape[:2])


def lower(args: FlashAttentionArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call."""
    slopes = args.alibi_slopes
    q_ids, k_ids, q_positions, k_positions = _segment_ids_and_positions(args)
    dropout = args.dropout_prob > 0
    return TiledAttention(
        query=args.query,
        key=args.key,
        value=args.value,
        softmax_scale=args.query.shape[-1] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        bias=args.bias,
        alibi_slopes=slopes if slopes is None or slopes.ndim == 2 else slopes[None],
        relative_bias=args.relative_bias,
        score_mod=args.score_mod,
        mask=_combined_mask(args),
        mask_mod=args.mask_mod,
        q_segment_ids=q_ids,
        kv_segment_ids=k_ids,
        q_positions=q_positions,
        kv_positions=k_positions,
        softmax_aux=sink_logits(args.softmax_aux, args.query.shape[2], args.query.dtype),
        dropout_seed=jnp.asarray(args.dropout_seed).astype(jnp.uint32) if dropout else None,
        dropout_prob=args.dropout_prob,
        causal=args.causal,
        sliding_window=as_window("sliding_window", args.sliding_window),
        logits_soft_cap=args.logits_soft_cap,
        normalize_output=args.normalize_output,
        precision=args.precision,
        # float32 is the record's word for "not rounded".
        logits_dtype=min(args.logits_dtype, jnp.dtype("float32"), key=lambda dtype: jnp.finfo(dtype).bits),
    )


def _combined_mask(args: FlashAttentionArguments) -> jax.Array | None:
    """Returns what `mask_info` and `attention_mask` both allow, [B|1, H|1, T|1, S|1]."""
    explicit = None if args.mask_info is None else args.mask_info.explicit_mask
    if args.attention_mask is None:
        return explicit
    mask = args.attention_mask.astype(bool)
    mask = mask[:, None, None] if mask.ndim == 2 else mask
    return mask if explicit is None else explicit & mask


def _segment_ids_and_positions(args: FlashAttentionArguments) -> tuple[jax.Array | None, ...]:
    """Returns segment ids of queries and keys, and their positions where indices would not do."""
    mask, (batch, queries), keys = args.mask_info or MaskInfo(), args.query.shape[:2], args.key.shape[1]
    ids = [mask.explicit_q_segment_ids, mask.explicit_kv_segment_ids]
    if ids[0] is not None and ids[1] is not None:
        ids = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in exact_segment_ids(ids[0], ids[1])]
    positions = [x if x is None else clamp_positions(x) for x in (mask.q_positions, mask.kv_positions)]
    explicit = any(x is not None for x in positions)
    if args.cum_seqlens_q is not None:
        cum_k = args.cum_seqlens_q if args.cum_seqlens_k is None else args.cum_seqlens_k
        packed = packing.packed_ids if batch == 1 else packing.padded_ids
        (q_ids, q_indices), (k_ids, k_indices) = packed(args.cum_seqlens_q, queries), packed(cum_k, keys)
        explicit_ids = None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
        ids = (q_ids, k_ids) if explicit_ids is None else packing.both_ids(explicit_ids, (q_ids, k_ids))
        # If both sides have the same packing, two tokens of a sequence have the same distance in indices as in
        # positions, and with indices tiles are skipped at compile time. In padded rows, indices are the positions.
        if explicit or (batch == 1 and args.cum_seqlens_k is not None):
            positions = [
                indices if x is None else x for indices, x in zip((q_indices, k_indices), positions, strict=True)
            ]
    # Otherwise nothing compares positions.
    bounded = args.causal or args.sliding_window is not None or args.alibi_slopes is not None
    return (*ids, *(positions if bounded else (None, None)))


def reference(args: FlashAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    output, residuals = tiled_attention.reference(lower(args))
    return with_lse(args, output, residuals.lse)


def _route_to_pages(args: FlashAttentionArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    """Routes a call over a cache of pages to `unified_attention`."""
    return (OP, args, options) if args.block_tables is None else paged_call(args, options)


class FlashAttention(Kernel[FlashAttentionConfig, Array]):
    """Wraps `flash_attention` in an object that an `Executor` can call."""

    def prepare(
        self,
        *args: Any,
        attention_mask: Bool[Array, "#b #h #t #s"] | Integer[Array, "#b #h #t #s"] | None = None,
        q_segment_ids: Integer[Array, "b t"] | None = None,
        kv_segment_ids: Integer[Array, "b s"] | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Accepts masks and segment ids directly, in place of `mask_info`.

        Args:
            *args: Positional arguments of `flash_attention`.
            attention_mask: [B|1, H|1, T|1, S|1], True (or nonzero) attends.
            q_segment_ids: [B, T] int; equal ids >= 0 attend.
            kv_segment_ids: [B, S] int; None means those of the queries.
            **kwargs: Keyword arguments of `flash_attention`.

        Raises:
            ValueError: A mask or segment ids are passed together with `mask_info`.
        """
        if attention_mask is None and q_segment_ids is None and kv_segment_ids is None:
            return args, kwargs
        if kwargs.get("mask_info") is not None:
            raise ValueError("mask_info: got a value with attention_mask or segment ids, wants one or the other")
        if q_segment_ids is None and kv_segment_ids is not None:
            raise ValueError("q_segment_ids: got None with kv_segment_ids given, wants [B, T] ints")
        mask_info = MaskInfo(
            _attention_mask=None if attention_mask is None else jnp.asarray(attention_mask).astype(bool),
            _q_segment_ids=q_segment_ids,
            _kv_segment_ids=q_segment_ids if kv_segment_ids is None else kv_segment_ids,
        )
        return args, {**kwargs, "mask_info": mask_info}


OP = Op(
    arguments=FlashAttentionArguments,
    family=tiled_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    conventions=conventions.dense_sentences(),
    reference=reference,
    cases=cases.cases(FlashAttentionArguments),
    make_inputs=cases.make_inputs,
    route=_route_to_pages,
    lse="b h t",
    axes={"softmax_aux": "h n", "block_tables": "b k"},
)
FlashAttention.op = OP
