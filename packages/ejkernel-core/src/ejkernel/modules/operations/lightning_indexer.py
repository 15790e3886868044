"""The lightning indexer: the keys that sparse attention reads, by the scores of a few small heads."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Integer, Num

from ejkernel.families import lightning_indexer as family
from ejkernel.modules.operations.cases import lightning_indexer as cases
from ejkernel.modules.operations.configs import LightningIndexerConfig
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.dense_arguments import check_cum_seqlens
from ejkernel.modules.operations.shared.key_ranges import key_ranges
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.listed_keys import check_request_pages, request_length_conditions
from ejkernel.modules.operations.shared.packed_key_blocks import PackedKeyBlocks, lay_out_packed_keys
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    as_window,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import TOLERANCE, Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.page_slots import slots_of_tokens
from ejkernel.types.integers import clamp_positions, clamp_to_int32

DTYPES_OF_8_BITS = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""Dtypes of keys, and of queries, that were divided by a scale and rounded."""


@document_options
def lightning_indexer(
    query: Num[Array, "b t h d"],
    key: Num[Array, "b s d"] | Num[Array, "p s d"],
    weights: Float[Array, "b t h"],
    cum_seqlens_q: Integer[Array, " n"] | None = None,
    cum_seqlens_k: Integer[Array, " n"] | None = None,
    key_scales: Float[Array, "b s"] | Float[Array, "p s"] | None = None,
    block_tables: Integer[Array, "b n"] | None = None,
    kv_lens: Integer[Array, " b"] | None = None,
    q_positions: Integer[Array, "b t"] | None = None,
    query_scales: Float[Array, "b t h"] | None = None,
    *,
    top_k: int = 2048,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    block_size: int = 1,
    local_blocks: int = 0,
    rectify: bool = True,
    platform: str | None = None,
    cfg: LightningIndexerConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Int32[Array, "b t k"], Float[Array, "b t k"]]:
    """Returns the keys with the largest indexer scores of each query (DeepSeek-V3.2), in memory linear in T.

    Shape letters: B batch, T queries, S keys, H indexer heads, D head size. The score of query t and key s is

        I[t, s] = sum over h of weights[t, h] * max(0, softmax_scale * <query[t, h], key[s]>)

    in float32; `query_scales[t, h]` multiplies the weight, and `key_scales[s]` the product. The indices are what
    `token_sparse_attention` reads. No array [T, S] is in memory: scores are computed for a tile, or for a chunk of
    queries, at a time.

    Of equal scores, the key with the lower index is selected first, so two runs and two backends select the same keys
    wherever scores are equal. -0 equals 0. NaN of either sign is above infinity, so a key with a score of NaN is
    selected first. Queries select only keys of the same packed sequence.

    With `block_tables`, keys are a cache in pages: row b of the queries has the newest tokens of request b, and indices
    count the tokens of that request. Tiles of keys are read from the pages, which are not copied.

    With `block_size` above 1, blocks are selected: block m has the keys from `m * block_size` on, its score is the
    largest of those that the query may select, and indices and `top_k` count blocks. Blocks of packed sequences start
    over with every sequence, and are numbered from 0 in each, as `native_sparse_attention` reads them.

    Over devices, batch and the queries' tokens can be split.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64. With keys of 8 bits also int8, float8_e4m3fn or
            float8_e5m2, which have no gradient; products are exact and sums are float32, except in `cuda_fp8`,
            whose sums have about 14 bits.
        key: [B, S, D], dtype of query; one key for all heads. Or int8, float8_e4m3fn or float8_e5m2, which have no
            gradient. With `block_tables` [P, S, D], pages of S tokens.
        weights: [B, T, H] floating, of any sign; may be float32 with any query. DeepSeek-V3.2 multiplies its projection
            by `H ** -0.5`, which the loss of the scores depends on.
        cum_seqlens_q: Cumulative query lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each
            other; with B > 1, [B + 1], row b holding one sequence followed by padding. May be traced; an eager call
            waits for the values and checks them. Sequences may be empty.
        cum_seqlens_k: The same for keys; None means those of the queries.
        key_scales: [B, S] or [P, S] floating, factors on the products with each key of 8 bits. No gradient.
        block_tables: [B, N] int, the pages of each request, no page twice. Tokens of an entry that is no page, such as
            -1, are not selected. With it, cum_seqlens_q is [B + 1] (row b has the newest so many tokens of its
            request, and padding after them), and cum_seqlens_k None.
        kv_lens: [B] int, tokens of each request, its queries included; None for all that its pages hold. Only with
            block_tables.
        q_positions: [B, T] int, the index of the key at each query's position, in its own sequence; below 0 for none
            yet, with `causal` (without it and a window, positions bound no keys). None aligns queries and keys at
            their ends. For keys that stand for several tokens.
        query_scales: [B, T, H] floating, factors on the weights, by which queries of 8 bits were divided. With scales
            of at least 0, the score is that of `query_scales * query`. No gradient.
        top_k: K, how many keys (or blocks) are selected per query, at least 1. May be larger than S.
        softmax_scale: Factor on the products; None means `D ** -0.5`.
        causal: Key position at most query position. The last query of a sequence has the position of its last key
            (bottom-right), so that the queries may be the newest tokens of a longer context.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive,
            by these positions; None on a side leaves it open.
        block_size: Keys per block.
        local_blocks: How many blocks are always selected: those of the last keys that a query may select. They come
            first, the latest first, with score inf; fewer than top_k. Those without a key on a page are left out.
        rectify: False leaves out the `max(0, ...)`, as MiniMax-M3 does.

    Returns:
        Two arrays [B, T, K], by descending score, with index -1 and score -inf where a query has fewer keys:

        - indices, int32: into axis S of key, also if packed, or tokens of a request, or blocks of the query's sequence;
        - scores, float32 (float64 for float64): differentiable in query, key and weights; selection has no gradient.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import lightning_indexer

        query = jnp.ones((1, 4, 1, 1))
        key = jnp.array([3.0, 5.0, 5.0, -1.0])[None, :, None]
        indices, scores = lightning_indexer(query, key, jnp.ones((1, 4, 1)), top_k=2)
        assert indices[0].tolist() == [[0, -1], [1, 0], [1, 2], [1, 2]]
        assert scores[0, 3].tolist() == [5.0, 5.0]
        ```
    """
    return run_operation(OP, locals())


class LightningIndexerArguments(ArgumentRecord, of=lightning_indexer):
    """The arguments of a call of `lightning_indexer`."""

    def __post_init__(self) -> None:
        scale = self.softmax_scale
        set_canonical_values(
            self,
            top_k=as_count("top_k", self.top_k, minimum=1),
            softmax_scale=None if scale is None else as_number("softmax_scale", scale),
            causal=as_flag("causal", self.causal),
            rectify=as_flag("rectify", self.rectify),
            block_size=as_count("block_size", self.block_size, minimum=1),
            local_blocks=as_count("local_blocks", self.local_blocks),
            sliding_window=as_window("sliding_window", self.sliding_window),
        )
        # The call goes on under a trace, where no values can be seen.
        for name, array in _cumulative_length_arguments(self):
            check_cumulative_lengths(name, getattr(self, name), *array.shape[:2])


def _cumulative_length_arguments(args: LightningIndexerArguments) -> Iterable[tuple[str, Any]]:
    """Yields the names of the cumulative lengths of a call, with the arrays whose tokens they count."""
    if have_ranks(args, query=4, key=3):
        pairs = (("cum_seqlens_q", args.query), ("cum_seqlens_k", args.key))
        pairs = pairs if args.block_tables is None else pairs[:1]
        yield from ((name, array) for name, array in pairs if getattr(args, name) is not None)


def validate(args: LightningIndexerArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    row = "B" if args.block_tables is None else "P"
    for name, axes in (("query", "B T H D"), ("key", f"{row} S D"), ("weights", "B T H")):
        check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("query", args.query, "B T H D", "H D")
    check_dtype("weights", args.weights, jnp.floating, "a floating dtype")
    if args.query.dtype not in DTYPES_OF_8_BITS:
        check_dtype("query", args.query, jnp.floating, "a floating dtype, or int8")
    if args.key.dtype not in DTYPES_OF_8_BITS:
        check_same_dtype({"query": args.query, "key": args.key})
    _check_scales(args, "query", "B T H", sizes)
    _check_scales(args, "key", f"{row} S", sizes)
    if args.q_positions is not None:
        check_shape("q_positions", args.q_positions, "B T", sizes)
        check_dtype("q_positions", args.q_positions, jnp.integer, "an integer dtype")
    check_request_pages(args.block_tables, args.kv_lens, args.key, sizes)
    _check_lengths(args, sizes)
    if args.local_blocks >= args.top_k:
        raise ValueError(f"local_blocks: got {args.local_blocks}, wants less than top_k={args.top_k}")


def _check_scales(args: LightningIndexerArguments, name: str, axes: str, sizes: dict[str, int]) -> None:
    """Raises ValueError for scales of a wrong shape, or of an array of more than 8 bits."""
    scales, dtype = getattr(args, f"{name}_scales"), getattr(args, name).dtype
    if scales is None:
        return
    check_shape(f"{name}_scales", scales, axes, sizes)
    check_dtype(f"{name}_scales", scales, jnp.floating, "a floating dtype")
    if dtype not in DTYPES_OF_8_BITS:
        raise ValueError(f"{name}_scales: got an array with {name} of {dtype}, wants None, or {name} of 8 bits")


def _check_lengths(args: LightningIndexerArguments, sizes: dict[str, int]) -> None:
    """Raises ValueError for wrong cumulative lengths. Over pages, each row has the queries of one request."""
    if args.block_tables is None:
        check_cum_seqlens(args, sizes)
        return
    if args.cum_seqlens_k is not None:
        raise ValueError("cum_seqlens_k: got an array with block_tables, wants None, and the lengths in kv_lens")
    if args.cum_seqlens_q is not None:
        check_shape("cum_seqlens_q", args.cum_seqlens_q, "B+1", {"B+1": sizes["B"] + 1})
        check_dtype("cum_seqlens_q", args.cum_seqlens_q, jnp.integer, "an integer dtype")


def conditions(args: LightningIndexerArguments) -> Iterable[Condition]:
    """Yields the conditions that cumulative lengths fit the arrays."""
    for name, array in _cumulative_length_arguments(args):
        yield from cumulative_length_conditions(name, getattr(args, name), *array.shape[:2])
    if args.block_tables is not None and have_ranks(args, key=3, block_tables=2):
        yield from request_length_conditions(args.kv_lens, args.block_tables.shape[1] * args.key.shape[1])


def lower(args: LightningIndexerArguments) -> family.LightningIndexer:
    """Returns the record of a call: the range of keys that each query may select."""
    (starts, ends), layout = _selectable_keys(args), _packed_key_blocks(args)
    if args.local_blocks:
        ends = jnp.minimum(ends, _local_blocks(args, ends)[..., -1] * args.block_size)
    key, scales = args.key, args.key_scales
    query, weights = _query_and_weights(args)
    if layout is not None:
        key, scales = layout.lay_out(key), None if scales is None else layout.lay_out(scales)
    if key.dtype in DTYPES_OF_8_BITS:
        key, scales = lax.stop_gradient((key, scales))
    return family.LightningIndexer(
        query=query,
        key=key,
        weights=weights,
        key_starts=starts,
        key_ends=ends,
        # Other blocks take the entries of local ones whose pages are absent.
        top_k=args.top_k - (args.local_blocks if args.block_tables is None else 0),
        softmax_scale=args.query.shape[3] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        key_scales=scales,
        block_tables=args.block_tables,
        block_size=args.block_size,
        rectify=args.rectify,
    )


def _query_and_weights(args: LightningIndexerArguments) -> tuple[jax.Array, jax.Array]:
    """Returns queries, of 8 bits only where a kernel may multiply them with keys of 8 bits, and weights multiplied by
    the scales of queries.
    """
    query, weights = args.query, args.weights
    if query.dtype in DTYPES_OF_8_BITS:
        query = lax.stop_gradient(query)
        is_float8 = query.dtype == args.key.dtype == jnp.float8_e4m3fn
        query = query if is_float8 else query.astype(jnp.bfloat16)
    if args.query_scales is not None:
        # float32 also for narrower weights, so that the products are rounded once.
        dtype = jnp.promote_types(jnp.promote_types(weights.dtype, args.query_scales.dtype), jnp.float32)
        weights = weights.astype(dtype) * lax.stop_gradient(args.query_scales).astype(dtype)
    return query, weights


def _packed_key_blocks(args: LightningIndexerArguments) -> PackedKeyBlocks | None:
    """Returns the layout in blocks of the keys of packed sequences; None if blocks are cut from the row."""
    (batch, queries, _, _), lengths = args.query.shape, _cumulative_lengths(args)
    if args.block_size == 1 or batch > 1 or lengths is None or lengths[0].shape[0] <= 2 or not args.key.shape[1]:
        return None
    return lay_out_packed_keys(args.block_size, (batch, queries, args.key.shape[1]), lengths)


def _cumulative_lengths(args: LightningIndexerArguments) -> tuple[jax.Array, jax.Array] | None:
    """Returns the cumulative lengths of queries and keys that a call has."""
    if args.cum_seqlens_q is None:
        return None
    return args.cum_seqlens_q, args.cum_seqlens_q if args.cum_seqlens_k is None else args.cum_seqlens_k


def _selectable_keys(args: LightningIndexerArguments) -> tuple[jax.Array, jax.Array]:
    """Returns the first key that each query may select and the key after the last one, [B|1, T] int32, as indices
    into the record's keys.
    """
    (batch, queries, _, _), keys, lengths = args.query.shape, args.key.shape[1], _cumulative_lengths(args)
    if args.block_tables is not None:
        keys = args.block_tables.shape[1] * keys
        q_lengths = jnp.arange(batch + 1) * queries if lengths is None else lengths[0]
        kv_lens = jnp.full(batch, keys) if args.kv_lens is None else jnp.clip(clamp_to_int32(args.kv_lens), 0, keys)
        lengths = q_lengths, jnp.pad(jnp.cumsum(kv_lens), (1, 0))
    positions = None if args.q_positions is None else clamp_positions(args.q_positions)
    starts, ends = key_ranges(
        (batch, queries, keys),
        lengths,
        causal=args.causal,
        sliding_window=args.sliding_window,
        q_positions=positions,
    )
    if (layout := _packed_key_blocks(args)) is None:
        return starts, ends
    has_keys = starts < ends
    return jnp.where(has_keys, starts + layout.offsets, 0), jnp.where(has_keys, ends + layout.offsets, 0)


def _local_blocks(args: LightningIndexerArguments, ends: jax.Array) -> jax.Array:
    """Returns the blocks of the last keys before `ends` [B|1, T], the latest first, [B|1, T, local_blocks]; those below
    0 do not exist.
    """
    return (ends[..., None] - 1) // args.block_size - jnp.arange(args.local_blocks, dtype=jnp.int32)


def finish(args: LightningIndexerArguments, result: family.TopKeyIndicesAndScores) -> family.TopKeyIndicesAndScores:
    """Returns indices and scores with those of the local blocks first; block indices count from 0 in each sequence."""
    indices, scores = result if not args.local_blocks else _with_local_blocks(args, *result)
    if (layout := _packed_key_blocks(args)) is not None:
        indices = jnp.where(indices >= 0, indices - layout.first_blocks[..., None], -1)
    return indices, scores


def _with_local_blocks(
    args: LightningIndexerArguments, indices: jax.Array, scores: jax.Array
) -> family.TopKeyIndicesAndScores:
    """Returns indices and scores with those of the local blocks in front."""
    blocks = jnp.broadcast_to(_selectable_local_blocks(args), (*indices.shape[:2], args.local_blocks))
    local_scores = jnp.where(blocks >= 0, jnp.inf, -jnp.inf).astype(scores.dtype)
    indices, scores = jnp.concatenate([blocks, indices], axis=2), jnp.concatenate([local_scores, scores], axis=2)
    if args.block_tables is None:
        return indices, scores
    order = jnp.argsort(indices < 0, axis=2, stable=True)[..., : args.top_k]
    return jnp.take_along_axis(indices, order, axis=2), jnp.take_along_axis(scores, order, axis=2)


def _selectable_local_blocks(args: LightningIndexerArguments) -> jax.Array:
    """Returns the local blocks of each query, [B|1, T, local_blocks]; -1 for one without a key that it may select."""
    starts, ends = (x[..., None] for x in _selectable_keys(args))
    blocks = _local_blocks(args, ends[..., 0])
    is_selectable = (starts < ends) & ((blocks + 1) * args.block_size > starts)
    if args.block_tables is not None:
        keys = blocks[..., None] * args.block_size + jnp.arange(args.block_size, dtype=jnp.int32)
        keys = jnp.where((keys >= starts[..., None]) & (keys < ends[..., None]), keys, -1)
        requests = jnp.arange(args.block_tables.shape[0], dtype=jnp.int32)[:, None, None, None]
        slots = slots_of_tokens(keys, requests, args.block_tables, (args.key.shape[0], args.key.shape[1]))
        is_selectable &= jnp.any(slots >= 0, axis=3)
    return jnp.where(is_selectable, blocks, -1)


def _axes_of(args: LightningIndexerArguments) -> dict[str, Any]:
    """Returns the axis letters of keys in pages, which belong to no batch row."""
    return {} if args.block_tables is None else {"key": "p s d", "key_scales": "p s"}


class LightningIndexer(Kernel[LightningIndexerConfig, tuple[Array, Array]]):
    """Wraps `lightning_indexer` in an object that an `Executor` can call."""


OP = Op(
    arguments=LightningIndexerArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    finish=finish,
    axes_of=_axes_of,
    cases=cases.cases(LightningIndexerArguments),
    make_inputs=cases.make_inputs,
    tolerance={**TOLERANCE, **tolerances(float8_e4m3fn=2e-5)},  # the cases have sums that 14 bits hold exactly
)
LightningIndexer.op = OP
