"""Native sparse attention: every query reads block means, the blocks that these point at, and its neighbourhood."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.arithmetic import at_most
from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import SelectedAttention
from ejkernel.modules.operations.cases import native_sparse_attention as cases
from ejkernel.modules.operations.configuration.latent import NativeSparseAttentionConfig
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.listed_keys import request_length_conditions
from ejkernel.modules.operations.shared.native_sparse_arguments import (
    StaticBlockCount,
    check_compressed_blocks,
    check_listed_blocks,
    check_sequence_lengths,
)
from ejkernel.modules.operations.shared.native_sparse_blocks import (
    KeyBlocks,
    QueryPlaces,
    block_means,
    complete_block_ids,
    make_key_blocks,
    place_queries,
    row_block_indices,
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
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.page_slots import has_page, rows_of_pages
from ejkernel.types.integers import NO_LIMIT, clamp_to_int32

DEFAULT_NUM_BLOCKS = 16
MIN_BLOCK_SIZE = 64  # for which every kernel has tiles
"""Blocks a query reads where the call does not say; the paper's number."""


@document_options
def native_sparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"] | Float[Array, "p s g d"],
    value: Float[Array, "b s g v"] | Float[Array, "p s g v"],
    g_cmp: Float[Array, "b t h"] | None = None,
    g_slc: Float[Array, "b t h"] | None = None,
    block_indices: Integer[Array, "b t g k"] | None = None,
    block_counts: int | Integer[Array, "b t g"] = DEFAULT_NUM_BLOCKS,
    cu_seqlens: Integer[Array, " n"] | None = None,
    *,
    g_swa: Float[Array, "b t h"] | None = None,
    cu_seqlens_k: Integer[Array, " n"] | None = None,
    kv_lens: Integer[Array, " b"] | None = None,
    block_tables: Integer[Array, "b n"] | None = None,
    compressed_key: Float[Array, "b m g d"] | Float[Array, "p m g d"] | None = None,
    compressed_value: Float[Array, "b m g v"] | Float[Array, "p m g v"] | None = None,
    block_size: int = 64,
    window_size: int = 512,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: NativeSparseAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"]:
    """Computes causal attention to blocks of keys (NSA, Yuan et al. 2025, arXiv:2502.11089), in memory linear in T and
    S.

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size, K slots of listed
    blocks, M blocks. Query head h reads KV head `h // (H // Hk)`. The last query of a sequence has the position of its
    last key (bottom-right), so that the queries may be the newest tokens of a longer context. Every sequence is cut
    into blocks of `block_size` keys, from its first key on. The outputs of three softmax attentions are added:

    1. *Compressed*, with g_cmp: the means of the keys and values of the blocks that are complete, that is, end no
       later than the query's position. It is 0 for queries before the end of the first block.
    2. *Selected*, always: the keys of the query's blocks, up to its position. They are `block_indices`, or else the
       `block_counts` blocks with the largest weight in the compressed branch, summed over the query heads of a KV head;
       the query's block is always selected, blocks after it never are, and of two blocks with equal weights the later
       one is selected. Where there are too few, the slots stay empty. What is selected has no gradient, as in the
       paper.
    3. *Window*, with g_swa: the newest `window_size` keys, up to and including the one at the query's position.

    The output is `g_slc * selected + g_cmp * compressed + g_swa * window`. Gates are used as they are given: a model
    passes them through its sigmoid. The paper's fixed first block and its second local block are not forced.

    To decode, pass a cache as key and value: row b of the queries has the newest tokens of request b, which has
    `kv_lens[b]` tokens, these included. With `block_tables` the cache is in pages. With `compressed_key` and
    `compressed_value` the means are cached as well, and only the selected blocks and the window are read from key and
    value.

    Over devices, batch, heads and the query's tokens can be split.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk. With `block_tables` [P, S, Hk, D], pages of S tokens.
        value: [B, S, Hk, V], dtype of query, or [P, S, Hk, V].
        g_cmp: [B, T, H] floating. None leaves the compressed branch out; block_indices are needed then.
        g_slc: [B, T, H] floating; None is 1.
        block_indices: [B, T, Hk, K] int, indices of blocks in the query's own sequence. If they are passed, no blocks
            are selected, with or without g_cmp. They are a set: a block that is listed twice counts once. An entry that
            is no block up to the query's (-1, say) is an empty slot. A row without any block is 0 in this branch.
        block_counts: How many blocks are selected, or how many of the slots of block_indices count; an int or, with
            block_indices, [B, T, Hk] int, which may be traced.
        cu_seqlens: Cumulative query lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each other
            and whose blocks start over; with B > 1, `kv_lens` or `block_tables`, [B + 1], row b holding one sequence
            followed by padding. May be traced; an eager call waits for the values and checks them. Sequences may be
            empty.
        g_swa: [B, T, H] floating. None leaves the window out.
        cu_seqlens_k: The same for keys; None means those of the queries. Only with cu_seqlens.
        kv_lens: [B] int, tokens of each request, its queries included; None if the cache is full. Replaces
            cu_seqlens_k.
        block_tables: [B, N] int, the pages of each request, no page twice. An entry that is no page, such as -1, is not
            read.
        compressed_key: [B, M, Hk, D], dtype of query: the key that represents each block in the compressed branch and
            in the selection, with M the blocks of a row, rounded up. Entries of blocks that are not complete are not
            read. For packed sequences, in the layout of `mean_pooling` with `block_size` and the lengths of the keys.
            With `block_tables` [P, S / block_size, Hk, D]: a page has whole blocks. None computes the means of all
            keys. Only with g_cmp and compressed_value.
        compressed_value: [B, M, Hk, V] or [P, S / block_size, Hk, V], the same for values.
        block_size: Keys per block, any int >= 1. Changes the answer, and so is no part of `cfg`.
        window_size: Keys of the window, any int >= 1.
        softmax_scale: Factor on the scores of all branches; None means `D ** -0.5`.

    Returns:
        [B, T, H, V] in query's dtype. Padding and queries without keys give 0, and so is their gradient. Differentiable
        in query, key, value, compressed_key, compressed_value and the gates.

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
        for name, array in _cumulative_length_arguments(self):
            check_cumulative_lengths(name, getattr(self, name), *array.shape[:2])


def _cumulative_length_arguments(args: NativeSparseAttentionArguments) -> Iterable[tuple[str, Any]]:
    """Yields the names of a call's cumulative lengths, each with the array whose tokens it counts."""
    if have_ranks(args, query=4, key=4):
        pairs = (("cu_seqlens", args.query), ("cu_seqlens_k", args.key))
        yield from ((name, array) for name, array in pairs if getattr(args, name) is not None)


def validate(args: NativeSparseAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    rows = "B" if args.block_tables is None else "P"
    for name, axes in (("query", "B T H D"), ("key", f"{rows} S Hk D"), ("value", f"{rows} S Hk V")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, axes[2:])
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
    check_listed_blocks(args, sizes)
    check_sequence_lengths(args, sizes)
    check_compressed_blocks(args, sizes)


def conditions(args: NativeSparseAttentionArguments) -> Iterable[Condition]:
    """Yields the conditions that lengths fit the arrays."""
    for name, array in _cumulative_length_arguments(args):
        yield from cumulative_length_conditions(name, getattr(args, name), *array.shape[:2])
    if have_ranks(args, key=4) and (args.block_tables is None or have_ranks(args, block_tables=2)):
        wants = "lengths of rows of key," if args.block_tables is None else "lengths that block_tables has pages for,"
        yield from request_length_conditions(args.kv_lens, _num_keys(args), wants)


def lower(args: NativeSparseAttentionArguments) -> SelectedAttention:
    """Returns the selected-attention record of a call: block means, and the blocks that are listed."""
    (rows, queries), keys, lengths = args.query.shape[:2], _num_keys(args), _cumulative_lengths(args)
    blocks = make_key_blocks(
        (rows, keys),
        _block_size(args, keys),
        None if lengths is None else lengths[1],
        is_packed=rows == 1 and not _rows_are_requests(args),
    )
    places = place_queries(blocks, (rows, queries, keys), lengths)
    blocks = _without_absent_pages(args, blocks)
    means = None if args.g_cmp is None else _compressed(args, blocks)
    selected = 0
    if args.block_indices is None:
        assert means is not None  # `validate` wants gates or blocks
        assert isinstance(args.block_counts, StaticBlockCount)  # `validate` wants gates or blocks
        selected = at_most(args.block_counts.count, means[0].shape[1])
    is_self_attention = not _rows_are_requests(args) and args.cu_seqlens_k is None and queries == keys
    return SelectedAttention(
        query=args.query,
        key=args.key,
        value=args.value,
        block_indices=_given_block_indices(args, places),
        softmax_scale=args.query.shape[-1] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        block_size=blocks.size,
        selected_blocks=selected,
        block_starts=None if blocks.key_ranges is None else blocks.key_ranges[:, 0],
        compressed_key=None if means is None else means[0],
        compressed_value=None if means is None else means[1],
        compressed_segment_ids=None if means is None else complete_block_ids(blocks),
        q_segment_ids=places.ids,
        kv_segment_ids=blocks.ids if args.block_tables is None else None,
        q_positions=None if is_self_attention else places.keys,
        g_slc=args.g_slc,
        g_cmp=args.g_cmp,
        g_swa=args.g_swa,
        window_size=None if args.g_swa is None else min(args.window_size, NO_LIMIT),
        block_tables=args.block_tables,
    )


def _rows_are_requests(args: NativeSparseAttentionArguments) -> bool:
    """Returns whether row b has the queries of request b, so that a single row is not packed."""
    return args.kv_lens is not None or args.block_tables is not None


def _num_keys(args: NativeSparseAttentionArguments) -> Any:
    """Returns the number of keys of a row, including those of absent pages."""
    size = args.key.shape[1]
    return size if args.block_tables is None else args.block_tables.shape[1] * size


def _cumulative_lengths(args: NativeSparseAttentionArguments) -> tuple[jax.Array, jax.Array] | None:
    """Returns the cumulative lengths of queries and keys; None if every row is one sequence without padding."""
    if not _rows_are_requests(args):
        if args.cu_seqlens is None:
            return None
        return args.cu_seqlens, args.cu_seqlens if args.cu_seqlens_k is None else args.cu_seqlens_k
    (rows, queries), keys = args.query.shape[:2], _num_keys(args)
    q_lengths = jnp.arange(rows + 1, dtype=jnp.int32) * queries if args.cu_seqlens is None else args.cu_seqlens
    kv_lens = jnp.full(rows, keys) if args.kv_lens is None else jnp.clip(clamp_to_int32(args.kv_lens), 0, keys)
    return q_lengths, jnp.pad(jnp.cumsum(kv_lens, dtype=jnp.int32), (1, 0))


def _block_size(args: NativeSparseAttentionArguments, keys: Any) -> int:
    """Returns the keys per block. A block longer than the row is shortened, but stays longer than the row, so that no
    query completes it.
    """
    longest = max(MIN_BLOCK_SIZE, 1 << keys.bit_length()) if isinstance(keys, int) else NO_LIMIT
    return min(args.block_size, longest)


def _without_absent_pages(args: NativeSparseAttentionArguments, blocks: KeyBlocks) -> KeyBlocks:
    """Returns the blocks, with the keys of absent pages marked as padding."""
    if args.block_tables is None or blocks.ids is None:
        return blocks
    pages, size = args.key.shape[:2]
    present = jnp.repeat(has_page(args.block_tables, pages), size, axis=1)
    return blocks._replace(ids=jnp.where(present, blocks.ids, -1))


def _compressed(args: NativeSparseAttentionArguments, blocks: KeyBlocks) -> tuple[jax.Array, jax.Array]:
    """Returns the compressed key and value of each block, [B, M, Hk, n] each."""
    tables, given = args.block_tables, (args.compressed_key, args.compressed_value)
    key, value = (args.key, args.value) if given[0] is None else given
    if tables is not None:
        key, value = rows_of_pages(key, tables), rows_of_pages(value, tables)
    if given[0] is None:
        return block_means(blocks, key), block_means(blocks, value)
    if blocks.ids is None:  # no ids mark the last block as incomplete, and it may hold anything
        complete = (jnp.arange(key.shape[1]) < args.key.shape[1] // blocks.size)[:, None, None]
        key, value = jnp.where(complete, key, 0), jnp.where(complete, value, 0)
    return key, value


def _given_block_indices(args: NativeSparseAttentionArguments, places: QueryPlaces) -> jax.Array | None:
    """Returns the caller's blocks; None where they are to be selected."""
    counts = args.block_counts
    counts = counts.count if isinstance(counts, StaticBlockCount) else counts
    return None if args.block_indices is None else row_block_indices(places, args.block_indices, counts)


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


def _axes_of(args: NativeSparseAttentionArguments) -> dict[str, Any]:
    """Returns the axis letters of arrays in pages, which belong to no batch row."""
    sizes = {"key": "s g d", "value": "s g v", "compressed_key": "m g d", "compressed_value": "m g v"}
    return {} if args.block_tables is None else {name: f"p {axes}" for name, axes in sizes.items()}


class NativeSparseAttention(Kernel[NativeSparseAttentionConfig, Array]):
    """Wraps `native_sparse_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=NativeSparseAttentionArguments,
    family=selected_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    reference=reference,
    cases=cases.cases(NativeSparseAttentionArguments),
    make_inputs=cases.make_inputs,
    configure=configure,
    axes_of=_axes_of,
)
NativeSparseAttention.op = OP
