"""Decoding over buffers of token rows, with the softmax denominator, for merging partial results."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import DecodeAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks, shared_prefix_conditions, value_range_condition
from ejkernel.modules.operations.shared.paged_arguments import (
    as_count,
    check_head_groups,
    check_integer_array,
    check_query,
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    score_fields,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.shapes import check_not_empty, check_same_dtype, check_shape, got
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.renamed import accept_older_names


@accept_older_names(seq_lens="kv_lens")
@document_options
def decode_attention(
    query: Float[Array, "r h d"],
    key_buffer: Float[Array, "total g d"],
    value_buffer: Float[Array, "total g v"],
    req_to_tokens: Integer[Array, "r k"],
    kv_lens: Integer[Array, " r"],
    *,
    softmax_scale: float | None = None,
    num_kv_splits: int | None = None,
    page_size: int = 1,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    platform: str | None = None,
    cfg: DecodeAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "r h v"], Float[Array, "r h"]]:
    """Computes attention of the newest token of every sequence over its cached keys, and log of its softmax
    denominator.

    Shape letters: N sequences, H query heads, Hk KV heads, D head size, Dv value size. The token at position k of
    sequence n lies in buffer row `req_to_tokens[n, k // page_size] * page_size + k % page_size`. The formula is in
    `ejkernel.families.paged_attention` (Kwon et al. 2023, arXiv:2309.06180). Not differentiable.

    Over devices, sequences and heads can be split.

    Args:
        query: [N, H, D] float16, bfloat16, float32 or float64; its position is `kv_lens[n] - 1`.
        key_buffer: [pages * page_size, Hk, D] floating; holds the query's own token already.
        value_buffer: [pages * page_size, Hk, Dv], dtype of key_buffer.
        req_to_tokens: [N, max_pages] int page numbers; with `page_size=1` token rows. Entries past a sequence's length
            are not looked at; within it, an entry that is no page of the buffers is a page without keys.
        kv_lens: [N] int, tokens of each sequence; a sequence of 0 gives 0. `seq_lens` is its old name.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        num_kv_splits: Independent partial softmaxes per sequence, in kernels that split (tuning); short for the field
            of `cfg`.
        page_size: Token rows of a page.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        sliding_window: The newest w >= 1 keys, or (left, right), inclusive.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).

    Returns:
        [N, H, Dv] in query's dtype, and [N, H] float32 (float64 for float64) log of the softmax denominator, sink
        included; -inf where there is nothing to attend.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import decode_attention

        query = jax.random.normal(jax.random.key(0), (2, 8, 64))
        buffer = jax.random.normal(jax.random.key(1), (16 * 4, 2, 64))  # 16 pages of 4 tokens
        pages = jnp.array([[3, 5, 9], [1, 0, 0]])
        output, lse = decode_attention(query, buffer, buffer, pages, jnp.array([11, 2]), page_size=4)
        assert output.shape == (2, 8, 64) and lse.shape == (2, 8)
        ```
    """
    return run_operation(OP, locals())


class DecodeAttentionArguments(ArgumentRecord, of=decode_attention):
    """The arguments of a call of `decode_attention`."""

    def __post_init__(self) -> None:
        if as_count("page_size", self.page_size) is None:
            raise ValueError(f"page_size: got {got(self.page_size)}, wants an int >= 1")
        set_canonical_score_arguments(self)


def validate(args: DecodeAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_query("query", args.query, "N H D", sizes)
    check_shape("key_buffer", args.key_buffer, "total Hk D", sizes)
    check_not_empty("key_buffer", args.key_buffer, "total Hk D", "Hk")
    check_shape("value_buffer", args.value_buffer, "total Hk Dv", sizes)
    check_same_dtype({"key_buffer": args.key_buffer, "value_buffer": args.value_buffer})
    check_head_groups("key_buffer", args.key_buffer, "query", sizes)
    if sizes["total"] % args.page_size:
        shape = tuple(args.key_buffer.shape)
        raise ValueError(
            f"key_buffer: got shape {shape}, wants a number of rows that page_size={args.page_size} divides"
        )
    check_integer_array("req_to_tokens", args.req_to_tokens, "N max_pages", sizes)
    check_integer_array("kv_lens", args.kv_lens, "N", sizes)
    check_not_empty("kv_lens", args.kv_lens, "N", "N")
    check_score_arguments(args, sizes)


def conditions(args: DecodeAttentionArguments) -> Iterable[Condition]:
    """Yields the condition that no sequence is longer than its pages."""
    if have_ranks(args, req_to_tokens=2, kv_lens=1):
        capacity = args.req_to_tokens.shape[1] * args.page_size
        yield from value_range_condition(
            "kv_lens", args.kv_lens, 0, capacity, "lengths that req_to_tokens has pages for,"
        )
        if args.shared_prefix is not None:
            yield from shared_prefix_conditions(args.shared_prefix, ("kv_lens", args.kv_lens), capacity)


def lower(args: DecodeAttentionArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    key, value = (
        x.reshape(x.shape[0] // args.page_size, args.page_size, *x.shape[1:])
        for x in (args.key_buffer, args.value_buffer)
    )
    return PagedAttention(
        query=args.query,
        key_pages=key,
        value_pages=value,
        block_tables=args.req_to_tokens,
        kv_lens=args.kv_lens,
        query_start=None,
        kv_layout="pshd",
        kv_heads=None,
        **score_fields(args, args.query, args.query.shape[-1]),
    )


def configure(args: DecodeAttentionArguments, cfg: DecodeAttentionConfig | None) -> DecodeAttentionConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(DecodeAttentionConfig, cfg, num_kv_splits=args.num_kv_splits)


class DecodeAttention(Kernel[DecodeAttentionConfig, tuple[Array, Array]]):
    """Wraps `decode_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=DecodeAttentionArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=paged_cases.decode_cases(DecodeAttentionArguments),
    make_inputs=paged_inputs.make_decode_inputs,
    axes={"key_buffer": "p g d", "value_buffer": "p g v"},
    configure=configure,
)
DecodeAttention.op = OP
