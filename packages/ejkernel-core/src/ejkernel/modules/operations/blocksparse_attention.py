"""Block-sparse attention: softmax attention that computes only the tiles in which its pattern has pairs."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.modules.operations.cases import blocksparse_attention as cases
from ejkernel.modules.operations.configuration.attention import BlockSparseAttentionConfig
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.lse import WithLse, split_output_and_lse, with_lse
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.modules.operations.shared.shapes import (
    as_chunk_size,
    as_flag,
    as_number,
    as_window,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning import packing
from ejkernel.types import MaskInfo
from ejkernel.types.integers import clamp_positions
from ejkernel.types.pair_functions import PairFunction
from ejkernel.types.sparse_masks import Mask, MultiHeadMask, diagonal_range_of


def _refuse_unsupported_arguments(qkv_layouts: Any, sequence_axis: Any) -> None:
    if qkv_layouts is not None:
        raise NotImplementedError(
            "qkv_layouts: got a value, wants None: a layout fits one block size, and here the block size is a "
            "configuration, which changes no result; describe the pattern with mask_builder"
        )
    if sequence_axis is not None:
        raise NotImplementedError(
            f"sequence_parallelism_mesh_axis_name: got {sequence_axis!r}; the spec of query in in_specs says over "
            "which mesh axes the queries are split"
        )


def _built_pattern(builder: Any, query: tuple[int, ...], key: tuple[int, ...]) -> Mask | None:
    """Returns the pattern that a `mask_builder` describes."""
    if builder is None or isinstance(builder, Mask) or len(query) != 4 or len(key) != 4:
        return builder
    if not callable(builder):
        raise ValueError(f"mask_builder: got {got(builder)}, wants a callable that returns a Mask, or a Mask")
    heads, sizes = query[1], (query[2], key[2])
    if not inspect.signature(builder).parameters:
        return _checked_mask(builder(), heads)
    masks = [_checked_mask(builder(*sizes, heads, head, sizes[0]), heads) for head in range(heads)]
    alike = all(mask == masks[0] for mask in masks)
    return masks[0] if alike else MultiHeadMask(tuple(mask.of_head(head) for head, mask in enumerate(masks)))


def _checked_mask(mask: Any, heads: int) -> Mask:
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask_builder: returned {got(mask)}, wants a Mask of ejkernel.types.sparse_masks; qkv_layouts are not "
            "supported"
        )
    if mask.heads not in (None, heads):
        raise ValueError(f"mask_builder: returned masks of {mask.heads} heads, wants those of query's {heads}")
    return mask


@document_options
def blocksparse_attention(
    query: Float[Array, "b h t d"],
    key: Float[Array, "b g s d"],
    value: Float[Array, "b g s v"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: Bool[Array, "#b #h #t #s"] | Integer[Array, "#b #h #t #s"] | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    sequence_parallelism_mesh_axis_name: str | None = None,
    logits_soft_cap: float | None = None,
    qkv_layouts: Any = None,
    softmax_scale: float | None = None,
    mask_builder: Mask | Callable[..., Mask] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
    fused_backward: bool = False,
    purify: bool = False,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: BlockSparseAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b h t v"] | WithLse:
    """Computes softmax attention over a pattern that is known when the call is traced; tiles without a pair cost
    nothing.

    Shape letters: B batch, H query heads, Hk KV heads, T queries, S keys, D head size, V value size: heads come before
    tokens. Query head h reads KV head `h // (H // Hk)`. The formula, term by term, is in
    `ejkernel.families.tiled_attention`; sparse patterns are from Child et al. 2019 (arXiv:1904.10509). Time grows with
    the tiles that hold an attending pair, memory with the lengths.

    Everything that restricts pairs applies together: `mask_builder`, `mask_mod`, `mask_info`, `attention_mask`,
    `causal`, `sliding_window` and `chunk_size`.

    Over devices, batch, heads and queries can be split; keys and head size cannot.

    Args:
        query: [B, H, T, D] float16, bfloat16, float32 or float64.
        key: [B, Hk, S, D], dtype of query; H is a multiple of Hk.
        value: [B, Hk, S, V], dtype of query.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores before the soft cap; -inf masks. Differentiable.
        mask_info: Mask, segments and positions.
        attention_mask: [B|1, H|1, T|1, S|1], True (or nonzero) attends; every head of it counts.
        score_mod: `(score, b, h, q_idx, k_idx) -> score`, as `flash_attention` has it. Differentiable.
        mask_mod: `(b, h, q_idx, k_idx) -> bool`, as `flash_attention` has it; with `mask_builder`, both apply.
        sequence_parallelism_mesh_axis_name: Refused; the spec of query in `in_specs` says what splits the queries.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        qkv_layouts: Refused: bounds of blocks depend on block sizes, which change no answer here.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        mask_builder: The pattern: a `Mask` of `ejkernel.types.sparse_masks`, or a callable that returns one, called
            when the call is made or traced: for every head as `(T, S, H, head, T)`, or once if it has no parameters.
            Patterns go by indices in the whole call, also under `shard_map`; they are part of what is compiled.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        chunk_size: Only tokens of the same run of `chunk_size` positions attend to each other.
        causal: Key position at most query position. Positions, which the window and chunks go by too, count from the
            first token of each side (top-left), unless `mask_info` gives them; then indices restrict nothing.
        fused_backward: Whether one sweep computes all gradients. Every implementation here does so either way.
        purify: Whether rows of padding are set to 0. They are either way.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, H, T, V] in query's dtype. Rows with nothing to attend are 0, and so is their gradient.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Raises:
        NotImplementedError: `qkv_layouts` or `sequence_parallelism_mesh_axis_name` is given.

    Example:
        ```python
        import jax
        from ejkernel.modules import blocksparse_attention
        from ejkernel.types.sparse_masks import ChunkedCausalMask, LocalMask

        query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 256, 32))

        def pattern(q_len, kv_len, num_heads, head, _):
            shape = (q_len, kv_len)
            return ChunkedCausalMask(shape, 64) if head % 2 else LocalMask(shape, (32, 0))

        output = blocksparse_attention(query, key, value, mask_builder=pattern)
        assert output.shape == (1, 4, 256, 32)
        ```
    """
    return run_operation(OP, locals())


class BlockSparseAttentionArguments(ArgumentRecord, of=blocksparse_attention):
    """The arguments of a call of `blocksparse_attention`."""

    def __post_init__(self) -> None:
        _refuse_unsupported_arguments(self.qkv_layouts, self.sequence_parallelism_mesh_axis_name)
        scale, cap = self.softmax_scale, self.logits_soft_cap
        canonical = {
            "return_lse": as_flag("return_lse", self.return_lse),
            "logits_soft_cap": None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            "softmax_scale": None if scale is None else as_number("softmax_scale", scale),
            "mask_builder": _built_pattern(self.mask_builder, jnp.shape(self.query), jnp.shape(self.key)),
            "sliding_window": as_window("sliding_window", self.sliding_window),
            "chunk_size": as_chunk_size("chunk_size", self.chunk_size),
            "causal": as_flag("causal", self.causal),
            "fused_backward": as_flag("fused_backward", self.fused_backward),
            "purify": as_flag("purify", self.purify),
            **pair_functions(self.score_mod, self.mask_mod, self.query),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)


def validate(args: BlockSparseAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes, full in (
        ("query", "B H T D", "H T D"),
        ("key", "B Hk S D", "Hk S"),
        ("value", "B Hk S V", "V"),
    ):
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, full)
    if args.attention_mask is not None:
        check_shape("attention_mask", args.attention_mask, "B H T S", sizes, broadcast="B H T S")
        if args.attention_mask.dtype != jnp.bool_:
            check_dtype("attention_mask", args.attention_mask, jnp.integer, "bool or an integer dtype")
    pattern: Any = args.mask_builder
    if pattern is not None:
        wants = (sizes["T"], sizes["S"])
        if pattern.shape != wants:
            raise ValueError(f"mask_builder: got a mask of shape {pattern.shape}, wants [T={wants[0]}, S={wants[1]}]")
        if pattern.heads not in (None, sizes["H"]):
            raise ValueError(f"mask_builder: got masks of {pattern.heads} heads, wants those of query's {sizes['H']}")
    jax.eval_shape(lambda args: validate_flash(_as_flash(args)), args)


def _as_flash(args: BlockSparseAttentionArguments) -> FlashAttentionArguments:
    """Returns the same call of `flash_attention`, without what that has no words for: pattern, chunks and
    `attention_mask`.
    """
    return FlashAttentionArguments(
        query=args.query.swapaxes(1, 2),
        key=args.key.swapaxes(1, 2),
        value=args.value.swapaxes(1, 2),
        bias=args.bias,
        softmax_aux=args.softmax_aux,
        mask_info=args.mask_info,
        score_mod=args.score_mod,
        mask_mod=args.mask_mod,
        softmax_scale=args.softmax_scale,
        dropout_prob=0.0,
        causal=args.causal,
        sliding_window=args.sliding_window,
        logits_soft_cap=args.logits_soft_cap,
        normalize_output=True,
        precision=None,
        logits_dtype=jnp.float32,
    )


def lower(args: BlockSparseAttentionArguments) -> TiledAttention:
    """Returns the tiled-attention record of a call."""
    record = lower_flash(_as_flash(args))
    pattern = cast("Mask | None", args.mask_builder)  # the record called the builder when it was made
    changes: dict[str, Any] = _pattern_fields(record, pattern)
    if args.attention_mask is not None:
        mask = args.attention_mask.astype(bool)
        changes["mask"] = mask if record.mask is None else mask & record.mask
    if args.chunk_size is not None:
        changes["q_segment_ids"], changes["kv_segment_ids"] = _segment_ids_of_chunks(args, record, args.chunk_size)
    return dataclasses.replace(record, **changes)


def _pattern_fields(record: TiledAttention, pattern: Mask | None) -> dict[str, Any]:
    """Returns the fields of a record that say a pattern: causal and window where it is a band around the diagonal.

    A band goes by indices, as the window does where the record has no positions.
    """
    band = None if pattern is None else diagonal_range_of(pattern)
    if band is None or record.q_positions is not None or record.kv_positions is not None:
        return {"pattern": pattern}
    least, most = band
    if (least or 0) > 0 or (most or 0) < 0:  # the diagonal is outside, and a window's sides are not negative
        return {"pattern": pattern}
    left, right = record.sliding_window or (None, None)
    left = min((side for side in (left, None if least is None else -least) if side is not None), default=None)
    right = min((side for side in (right, most) if side is not None), default=None)
    causal = record.causal or right == 0
    window = left, None if causal else right
    return {"causal": causal, "sliding_window": None if window == (None, None) else window}


def _segment_ids_of_chunks(
    args: BlockSparseAttentionArguments, record: TiledAttention, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns segment ids under which tokens attend if they are of one chunk and, where there are segments, of one of
    these.
    """
    mask, batch = args.mask_info or MaskInfo(), args.query.shape[0]
    placed = dataclasses.replace(record, q_positions=mask.q_positions, kv_positions=mask.kv_positions)
    q, k = (
        jnp.broadcast_to(clamp_positions(x) // chunk_size, (batch, x.shape[1]))
        for x in tiled_attention.query_and_key_positions(placed)
    )
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return q, k
    return packing.both_ids((record.q_segment_ids, record.kv_segment_ids), (q, k))


def finish(args: BlockSparseAttentionArguments, value: Any) -> Any:
    """Returns what the public function returns: the output with heads before tokens."""
    output, lse = split_output_and_lse(args, value)
    return with_lse(args, output.swapaxes(1, 2), lse)


def reference(args: BlockSparseAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    output, residuals = tiled_attention.reference(lower(args))
    return finish(args, with_lse(args, output, residuals.lse))


class BlockSparseAttention(Kernel[BlockSparseAttentionConfig, Array]):
    """Wraps `blocksparse_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=BlockSparseAttentionArguments,
    family=tiled_attention.FAMILY,
    validate=validate,
    lower=lower,
    conventions=conventions.dense_sentences(2),
    reference=reference,
    cases=cases.cases(BlockSparseAttentionArguments),
    make_inputs=cases.make_inputs,
    axes={"softmax_aux": "h n"},
    finish=finish,
    output="b h t v",
    lse="b h t",
)
BlockSparseAttention.op = OP
