"""Prefill of one sequence's chunk over a cache of pages that holds the chunk already."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import PrefillPageAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks, value_range_condition
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    as_kv_layout,
    cache_axes,
    check_caches,
    check_integer_array,
    check_query,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    score_fields,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.renamed import accept_older_names
from ejkernel.types.pair_functions import PairFunction


@accept_older_names(context_len="kv_lens", attn_logits_soft_cap="logits_soft_cap")
@document_options
def prefill_page_attention(
    query: Float[Array, "t h d"],
    key_cache: Float[Array, "g p s d"],
    value_cache: Float[Array, "g p s v"],
    kv_lens: Integer[Array, " 1"],
    page_indices: Integer[Array, " k"],
    *,
    softmax_scale: float | None = None,
    mask_value: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    kv_layout: Literal["pshd", "phsd", "hpsd"] | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    qq_bias: Float[Array, "i i"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: PrefillPageAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "t h v"] | WithLse:
    """Computes causal attention of a sequence's newest C tokens over its cached keys (Kwon et al. 2023).

    Shape letters: C tokens of the chunk, P pages of S slots, H query heads, Hk KV heads, D head size, Dv value size.
    Row i of the query is at position `kv_lens[0] - C + i`. The token at position k lies in page
    `page_indices[k // S]`, slot `k % S`. The formula is in `ejkernel.families.paged_attention`. Not differentiable.

    Over devices, heads can be split, on the axis where `kv_layout` has them.

    Args:
        query: [C, H, D] float16, bfloat16, float32 or float64.
        key_cache: [Hk, P, S, D] floating ("hpsd"), or as `kv_layout` says; holds the chunk already.
        value_cache: [Hk, P, S, Dv], dtype of key_cache.
        kv_lens: [1] int, tokens of the sequence, the chunk included. Rows before its first token give 0. `context_len`
            is its old name.
        page_indices: [n_pages] int. Entries past the sequence's length are not looked at; within it, an entry that is
            no page of the cache is a page without keys.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        mask_value: Score of masked keys, at most -10000; they weigh nothing, whatever it is.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`. `attn_logits_soft_cap` is its old name.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        kv_layout: Order of the caches' axes: page (p), slot (s), head (h), size (d). None takes the one in which the
            cache's KV heads divide the query's heads, and fails where there are several: it is never guessed.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j; none beyond Q. -inf masks.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        score_mod: `(score, n, h, q_pos, k_pos) -> score`, a function of scalars that replaces each score after the soft
            cap: n is 0, h the query head, q_pos and k_pos are positions in the sequence, not in pages.
        mask_mod: `(n, h, q_pos, k_pos) -> bool`, True where a pair attends; applies together with everything else. Both
            functions may close over arrays.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [C, H, Dv] in query's dtype.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import prefill_page_attention

        query = jax.random.normal(jax.random.key(0), (24, 8, 64))
        cache = jax.random.normal(jax.random.key(1), (2, 16, 16, 64))  # KV heads, pages, page size, head size
        output = prefill_page_attention(query, cache, cache, jnp.array([40]), jnp.array([3, 5, 9, 0]))
        assert output.shape == (24, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class PrefillPageAttentionArguments(ArgumentRecord, of=prefill_page_attention):
    """The arguments of a call of `prefill_page_attention`."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(
            self,
            kv_layout=as_kv_layout(self.kv_layout, self.query, self.key_cache, "hpsd"),
            **pair_functions(self.score_mod, self.mask_mod, self.query),
        )


def validate(args: PrefillPageAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {"1": 1}
    check_query("query", args.query, "C H D", sizes)
    caches = {"key_cache": args.key_cache, "value_cache": args.value_cache}
    check_caches("query", caches, args.kv_layout, sizes, "kv_layout")
    check_integer_array("kv_lens", args.kv_lens, "1", sizes)
    check_integer_array("page_indices", args.page_indices, "n_pages", sizes)
    check_score_arguments(args, sizes)


def conditions(args: PrefillPageAttentionArguments) -> Iterable[Condition]:
    """Yields the condition that the sequence is not longer than its pages."""
    if have_ranks(args, key_cache=4, kv_lens=1, page_indices=1):
        capacity = args.page_indices.shape[0] * args.key_cache.shape[args.kv_layout.index("s")]
        yield from value_range_condition(
            "kv_lens", args.kv_lens, 0, capacity, "a length that page_indices has pages for,"
        )


def lower(args: PrefillPageAttentionArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    chunk, _, size = args.query.shape
    return PagedAttention(
        query=args.query,
        key_pages=args.key_cache,
        value_pages=args.value_cache,
        block_tables=args.page_indices[None],
        kv_lens=args.kv_lens,
        query_start=jnp.array([0, chunk], jnp.int32),
        kv_layout=args.kv_layout,
        kv_heads=None,
        **score_fields(args, args.query, size),
    )


def finish(args: PrefillPageAttentionArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns."""
    return with_lse(args, output[0], output[1])


class PrefillPageAttention(Kernel[PrefillPageAttentionConfig, Array]):
    """Wraps `prefill_page_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=PrefillPageAttentionArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=paged_cases.prefill_cases(PrefillPageAttentionArguments),
    make_inputs=paged_inputs.make_prefill_inputs,
    axes={"kv_lens": "r"},
    finish=finish,
    axes_of=lambda args: cache_axes(args.kv_layout),
    output="t h v",
    lse="t h",
)
PrefillPageAttention.op = OP
