"""Decoding over a cache of pages: one query token a sequence."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.arithmetic import cdiv
from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import PageAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks, shared_prefix_conditions, value_range_condition
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    as_choice,
    as_count,
    as_kv_layout,
    cache_axes,
    check_caches,
    check_integer_array,
    check_query,
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    score_fields,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.modules.operations.shared.shapes import check_not_empty
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.renamed import accept_older_names
from ejkernel.types.pair_functions import PairFunction


@accept_older_names(context_lens="kv_lens", attn_scale="softmax_scale", attn_logits_soft_cap="logits_soft_cap")
@document_options
def page_attention(
    query: Float[Array, "r h d"] | Float[Array, "r 1 h d"],
    key_cache: Float[Array, "p s g d"],
    value_cache: Float[Array, "p s g v"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"],
    *,
    softmax_scale: float | None = None,
    max_context_len: int | None = None,
    num_splits: int | None = 0,
    mask_value: float | None = None,
    logits_soft_cap: float | None = None,
    pages_per_compute_block: int | None = None,
    megacore_mode: Literal["batch", "kv_head"] | None = None,
    inline_seq_dim: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    kv_layout: Literal["pshd", "phsd", "hpsd"] | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: PageAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "r h v"] | Float[Array, "r 1 h v"] | WithLse:
    """Computes attention of the newest token of every sequence over its cached keys (Kwon et al. 2023).

    Shape letters: N sequences, P pages of S slots, H query heads, Hk KV heads, D head size, Dv value size. The token at
    position k of sequence n lies in page `block_tables[n, k // S]`, slot `k % S`. The formula is in
    `ejkernel.families.paged_attention`. Not differentiable.

    Over devices, sequences and heads can be split, heads on the axis where `kv_layout` has them; the spec of the query
    is that of [N, H, D].

    Args:
        query: [N, H, D] or [N, 1, H, D] float16, bfloat16, float32 or float64; its position is `kv_lens[n] - 1`.
        key_cache: [P, S, Hk, D] floating ("pshd"), or as `kv_layout` says; holds the query's own token already.
        value_cache: [P, S, Hk, Dv], dtype of key_cache.
        kv_lens: [N] int, tokens of each sequence; a sequence of 0 gives 0. `context_lens` is its old name.
        block_tables: [N, max_blocks] int. Entries past a sequence's length are not looked at; within it, an entry that
            is no page of the cache is a page without keys.
        softmax_scale: Factor on the scores; None means `D ** -0.5`. `attn_scale` is its old name.
        max_context_len: A promise that no sequence is longer; only so much of the tables is then read.
        num_splits: Independent partial softmaxes per sequence, in kernels that split; 0 for the heuristics. Like the
            other tuning arguments it is short for the field of `cfg`.
        mask_value: Score of masked keys, at most -10000; they weigh nothing, whatever it is.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`. `attn_logits_soft_cap` is its old name.
        pages_per_compute_block: Pages per tile, in kernels that read whole pages (tuning).
        megacore_mode: What the two cores of a TPU divide: `"batch"` or `"kv_head"` (tuning).
        inline_seq_dim: Whether a TPU kernel loops over the sequences itself (tuning).
        sliding_window: The newest w >= 1 keys, or (left, right), inclusive.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        kv_layout: Order of the caches' axes: page (p), slot (s), head (h), size (d). None takes the one in which the
            cache's KV heads divide the query's heads, and fails where there are several: it is never guessed.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        score_mod: `(score, n, h, q_pos, k_pos) -> score`, a function of scalars that replaces each score after the soft
            cap: n is the sequence, h the query head, q_pos and k_pos are positions in the sequence, not in pages.
        mask_mod: `(n, h, q_pos, k_pos) -> bool`, True where a pair attends; applies together with everything else. Both
            functions may close over arrays.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [N, H, Dv] in query's dtype; [N, 1, H, Dv] for a query of rank 4.
        With `return_lse`, lse [N, H] (or [N, 1, H]) after the output: float32 (float64 for float64),
        natural logarithm, -inf where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import page_attention

        query = jax.random.normal(jax.random.key(0), (2, 1, 8, 64))  # batch, 1, heads, head size
        cache = jax.random.normal(jax.random.key(1), (16, 16, 2, 64))  # blocks, block size, KV heads, head size
        lengths = jnp.array([40, 17])
        tables = jnp.array([[3, 5, 9], [1, 2, 0]])  # 40 tokens take 3 blocks, 17 take 2
        output = page_attention(query, cache, cache, lengths, tables)
        assert output.shape == (2, 1, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class PageAttentionArguments(ArgumentRecord, of=page_attention):
    """The arguments of a call of `page_attention`."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(
            self,
            num_splits=as_count("num_splits", self.num_splits, minimum=0) or None,
            megacore_mode=as_choice("megacore_mode", self.megacore_mode, (None, "batch", "kv_head")),
            kv_layout=as_kv_layout(self.kv_layout, self.query, self.key_cache, "pshd"),
            **pair_functions(self.score_mod, self.mask_mod, self.query),
        )


def validate(args: PageAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {"1": 1}
    check_query("query", args.query, "N 1 H D" if getattr(args.query, "ndim", 3) == 4 else "N H D", sizes)
    caches = {"key_cache": args.key_cache, "value_cache": args.value_cache}
    check_caches("query", caches, args.kv_layout, sizes, "kv_layout")
    check_integer_array("kv_lens", args.kv_lens, "N", sizes)
    check_not_empty("kv_lens", args.kv_lens, "N", "N")
    check_integer_array("block_tables", args.block_tables, "N max_blocks", sizes)
    check_score_arguments(args, sizes)


def conditions(args: PageAttentionArguments) -> Iterable[Condition]:
    """Yields the conditions that no sequence is longer than its table or than `max_context_len`, and that all sequences
    have the shared prefix.
    """
    if not have_ranks(args, key_cache=4, kv_lens=1, block_tables=2):
        return
    capacity = args.block_tables.shape[1] * args.key_cache.shape[args.kv_layout.index("s")]
    yield from value_range_condition("kv_lens", args.kv_lens, 0, capacity, "lengths that block_tables has pages for,")
    if args.max_context_len is not None and args.max_context_len < capacity:
        what = "lengths that max_context_len promises,"
        yield from value_range_condition("kv_lens", args.kv_lens, 0, args.max_context_len, what)
    if args.shared_prefix is not None:
        yield from shared_prefix_conditions(args.shared_prefix, ("kv_lens", args.kv_lens), capacity)


def lower(args: PageAttentionArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    query, tables = args.query.reshape(args.query.shape[0], *args.query.shape[-2:]), args.block_tables
    if args.max_context_len is not None:
        tables = tables[:, : cdiv(args.max_context_len, args.key_cache.shape[args.kv_layout.index("s")])]
    return PagedAttention(
        query=query,
        key_pages=args.key_cache,
        value_pages=args.value_cache,
        block_tables=tables,
        kv_lens=args.kv_lens,
        query_start=None,
        kv_layout=args.kv_layout,
        kv_heads=None,
        **score_fields(args, query, query.shape[-1]),
    )


def finish(args: PageAttentionArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output, with the query's axes."""
    arrays = (x[:, None] if args.query.ndim == 4 else x for x in output[:2])
    return with_lse(args, *arrays)


def configure(args: PageAttentionArguments, cfg: PageAttentionConfig | None) -> PageAttentionConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(
        PageAttentionConfig,
        cfg,
        num_splits=args.num_splits,
        pages_per_compute_block=args.pages_per_compute_block,
        megacore_mode=args.megacore_mode,
        inline_seq_dim=None if args.inline_seq_dim else False,
    )


class PageAttention(Kernel[PageAttentionConfig, Array]):
    """Wraps `page_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=PageAttentionArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=paged_cases.page_cases(PageAttentionArguments),
    make_inputs=paged_inputs.make_inputs,
    finish=finish,
    axes_of=lambda args: cache_axes(args.kv_layout),
    output="r h v",
    lse="r h",
    configure=configure,
)
PageAttention.op = OP
