"""Native sparse attention: every query reads block means, the blocks that these point at, and its neighbourhood."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import SelectedAttention
from ejkernel.modules.operations.cases import native_sparse_attention as cases
from ejkernel.modules.operations.configuration.latent import NativeSparseAttentionConfig
from ejkernel.modules.operations.shared.conditions import conditions_of_cumulative_lengths
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.native_sparse_blocks import (
    TokenBlocks,
    block_means,
    make_token_blocks,
    row_block_indices,
    sequence_of_each_block,
)
from ejkernel.modules.operations.shared.repeated import check_config_agrees_with_call
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_number,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.types.integers import NO_LIMIT

DEFAULT_NUM_BLOCKS = 16
MIN_BLOCK_SIZE = 64  # for which every kernel has tiles
"""Blocks a query reads where the call does not say; the paper's number."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticBlockCount:
    """A number of blocks that is part of a call's structure, since shapes follow from it."""

    count: int


@document_options
def native_sparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t g d"],
    value: Float[Array, "b t g v"],
    g_cmp: Float[Array, "b t h"] | None = None,
    g_slc: Float[Array, "b t h"] | None = None,
    block_indices: Integer[Array, "b t g k"] | None = None,
    block_counts: int | Integer[Array, "b t g"] = DEFAULT_NUM_BLOCKS,
    cu_seqlens: Integer[Array, " n"] | None = None,
    *,
    g_swa: Float[Array, "b t h"] | None = None,
    block_size: int = 64,
    window_size: int = 512,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"]:
    """Computes causal self-attention to blocks of keys (NSA, Yuan et al. 2025, arXiv:2502.11089), in memory linear in
    T.

    Shape letters: B batch, T tokens, H query heads, Hk KV heads, D head size, V value size, S slots of listed blocks.
    Query head h reads KV head `h // (H // Hk)`. Blocks are `block_size` tokens, cut from the first token of every
    sequence on. Three branches, each a softmax attention of its own, are added up:

    1. *Compressed*, with g_cmp: the means of the keys and values of the blocks that are complete, that is, end no
       later than the query's token. Nothing before the first of them does. The mean of the last block of a sequence is
       over the tokens it has, but unless it is complete no query ever reads it.
    2. *Selected*, always: the tokens of the query's blocks, up to its own. They are `block_indices`, or else the
       `block_counts` blocks with the largest weight in the compressed branch, summed over the query heads of a KV head;
       the query's own block is always taken, blocks after it never, of two that weigh the same the later. Where there
       are too few, the slots stay empty. What is selected has no gradient, as in the paper.
    3. *Window*, with g_swa: the newest `window_size` tokens, the query's own among them.

    The output is `g_slc * selected + g_cmp * compressed + g_swa * window`. Gates are used as they are given: a model
    passes them through its sigmoid. The paper's fixed first block and its second local block are not forced.

    Over devices, batch, heads and the query's tokens can be split.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, T, Hk, D], dtype of query; H is a multiple of Hk.
        value: [B, T, Hk, V], dtype of query.
        g_cmp: [B, T, H] floating. None leaves the compressed branch out; block_indices are needed then.
        g_slc: [B, T, H] floating; None is 1.
        block_indices: [B, T, Hk, S] int, numbers of blocks in the query's own sequence. They win over a selection, with
            or without g_cmp. They are a set: a block that is listed twice counts once, and what is no block before
            the query (-1, say) is an empty slot. A row without any is 0 in this branch.
        block_counts: How many blocks are selected, or how many of the slots of block_indices count; an int or, with
            block_indices, [B, T, Hk] int, which may be traced.
        cu_seqlens: Cumulative lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each other and
            whose blocks start over; with B > 1, [B + 1], row b holding one sequence followed by padding. May be traced;
            values that are not are checked, for which an eager call waits. Sequences may be empty.
        g_swa: [B, T, H] floating. None leaves the window out.
        block_size: Tokens per block, any int >= 1. Changes the answer, and so is no part of `cfg`.
        window_size: Tokens of the window, any int >= 1.
        softmax_scale: Factor on the scores of all branches; None means `D ** -0.5`.

    Returns:
        [B, T, H, V] in query's dtype. Padding is 0, and so is its gradient. Differentiable in query, key, value and
        the gates.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import native_sparse_attention

        query = jax.random.normal(jax.random.key(0), (1, 256, 8, 64))
        key = value = jax.random.normal(jax.random.key(1), (1, 256, 2, 64))
        gates = jax.nn.sigmoid(jax.random.normal(jax.random.key(2), (3, 1, 256, 8)))
        output = native_sparse_attention(
            query, key, value, gates[0], gates[1], None, 4, g_swa=gates[2], block_size=32, window_size=64
        )
        assert output.shape == (1, 256, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class NativeSparseAttentionArguments(ArgumentRecord, of=native_sparse_attention):
    """The arguments of a call of `native_sparse_attention`."""

    def __post_init__(self) -> None:
        counts, scale = self.block_counts, self.softmax_scale
        if not isinstance(counts, StaticBlockCount) and not hasattr(counts, "shape"):
            counts = StaticBlockCount(as_count("block_counts", counts, minimum=1))
        set_canonical_values(
            self,
            block_counts=counts,
            block_size=as_count("block_size", self.block_size, minimum=1),
            window_size=as_count("window_size", self.window_size, minimum=1),
            softmax_scale=None if scale is None else as_number("softmax_scale", scale),
        )
        # The call goes on under a trace, where no values can be seen.
        if self.cu_seqlens is not None and getattr(self.query, "ndim", 0) == 4:
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, *self.query.shape[:2])


def validate(args: NativeSparseAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("query", "B T H D"), ("key", "B T Hk D"), ("value", "B T Hk V")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, axes.removeprefix("B "))
    check_dtype("query", args.query, jnp.floating, "a floating dtype")
    check_same_dtype({"query": args.query, "key": args.key, "value": args.value})
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"key: got shape {args.key.shape} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )
    for name in ("g_cmp", "g_slc", "g_swa"):
        if getattr(args, name) is not None:
            check_shape(name, getattr(args, name), "B T H", sizes)
            check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    _check_block_arguments(args, sizes)
    if args.cu_seqlens is not None:
        check_shape("cu_seqlens", args.cu_seqlens, "N+1" if sizes["B"] == 1 else "B+1", {"B+1": sizes["B"] + 1})
        check_dtype("cu_seqlens", args.cu_seqlens, jnp.integer, "an integer dtype")
        if args.cu_seqlens.shape[0] < 2 and sizes["B"] == 1:
            raise ValueError(f"cu_seqlens: got shape {args.cu_seqlens.shape}, wants [N + 1] with at least 1 sequence")


def _check_block_arguments(args: NativeSparseAttentionArguments, sizes: dict[str, int]) -> None:
    if args.block_indices is None:
        if args.g_cmp is None:
            raise ValueError(
                "block_indices: got None with g_cmp None, wants one of the two, which select the blocks to read"
            )
        if not isinstance(args.block_counts, StaticBlockCount):
            raise ValueError(
                f"block_counts: got {got(args.block_counts)} with block_indices None, wants an int: how many blocks "
                f"are selected is the size of an array"
            )
        return
    check_shape("block_indices", args.block_indices, "B T Hk S", sizes)
    check_dtype("block_indices", args.block_indices, jnp.integer, "an integer dtype")
    if not isinstance(args.block_counts, StaticBlockCount):
        check_shape("block_counts", args.block_counts, "B T Hk", sizes)
        check_dtype("block_counts", args.block_counts, jnp.integer, "an integer dtype")


def lower(args: NativeSparseAttentionArguments) -> SelectedAttention:
    """Returns the selected-attention record of a call: block means, and the blocks that are listed."""
    scale = args.query.shape[-1] ** -0.5 if args.softmax_scale is None else args.softmax_scale
    blocks = make_token_blocks(args.query.shape, _block_size(args), args.cu_seqlens)
    means = None if args.g_cmp is None else block_means(blocks, args.key)
    selected = 0
    if args.block_indices is None:
        assert means is not None  # `validate` wants gates or blocks
        assert isinstance(args.block_counts, StaticBlockCount)  # `validate` wants gates or blocks
        selected = min(args.block_counts.count, means.shape[1])
    return SelectedAttention(
        query=args.query,
        key=args.key,
        value=args.value,
        block_indices=_given_block_indices(args, blocks),
        softmax_scale=scale,
        block_size=blocks.size,
        selected_blocks=selected,
        block_starts=None if blocks.token_ranges is None else blocks.token_ranges[:, 0],
        compressed_key=means,
        compressed_value=None if means is None else block_means(blocks, args.value),
        compressed_segment_ids=None if means is None else sequence_of_each_block(blocks),
        q_segment_ids=blocks.ids,
        kv_segment_ids=blocks.ids,
        g_slc=args.g_slc,
        g_cmp=args.g_cmp,
        g_swa=args.g_swa,
        window_size=None if args.g_swa is None else min(args.window_size, NO_LIMIT),
    )


def _block_size(args: NativeSparseAttentionArguments) -> int:
    """Returns tokens per block; one that is longer than the row is cut to a length that no query is at
    the end of either.
    """
    tokens: Any = args.query.shape[1]
    longest = max(MIN_BLOCK_SIZE, 1 << tokens.bit_length()) if isinstance(tokens, int) else NO_LIMIT
    return min(args.block_size, longest)


def _given_block_indices(args: NativeSparseAttentionArguments, blocks: TokenBlocks) -> jax.Array | None:
    """Returns the caller's blocks; None where they are to be selected."""
    counts = args.block_counts
    counts = counts.count if isinstance(counts, StaticBlockCount) else counts
    return None if args.block_indices is None else row_block_indices(blocks, args.block_indices, counts)


def reference(args: NativeSparseAttentionArguments) -> jax.Array:
    """Returns the operation's meaning in plain jnp."""
    with jax.default_matmul_precision("highest"):
        return selected_attention.reference(lower(args))[0]


def configure(
    args: NativeSparseAttentionArguments, cfg: NativeSparseAttentionConfig | None
) -> NativeSparseAttentionConfig | None:
    """Returns the call's own configuration, if it repeats the call's arguments."""
    check_config_agrees_with_call(cfg, block_size=args.block_size)
    return cfg


class NativeSparseAttention(Kernel[NativeSparseAttentionConfig, Array]):
    """Wraps `native_sparse_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=NativeSparseAttentionArguments,
    family=selected_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions_of_cumulative_lengths("cu_seqlens", "query"),
    reference=reference,
    cases=cases.cases(NativeSparseAttentionArguments),
    make_inputs=cases.make_inputs,
    configure=configure,
    axes={"key": "b s g d", "value": "b s g v"},
)
NativeSparseAttention.op = OP
