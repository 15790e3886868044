"""The shared code of operations on batches of prefills and decodes over separate caches: checks, conditions, the
record.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.paged_arguments import check_caches, check_packed_sequences, check_query
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    packed_sequence_conditions,
    score_fields,
)
from ejkernel.ops.values import Condition


def check_batch(args: Any) -> dict[str, int]:
    """Checks the arrays of a call, and returns its sizes by letter.

    Raises:
        ValueError: One of them is wrong on every backend.
    """
    sizes: dict[str, int] = {}
    check_query("queries", args.queries, "T H D", sizes)
    check_caches("queries", {"key_cache": args.key_cache, "value_cache": args.value_cache}, "pshd", sizes)
    check_packed_sequences("kv_lens", "block_tables", "query_start_loc", args, sizes)
    check_score_arguments(args, sizes)
    return sizes


def have_expected_ranks(args: Any) -> bool:
    """Returns whether the arrays that conditions read the sizes of have their axes."""
    return have_ranks(args, queries=3, key_cache=4, block_tables=2)


def batch_conditions(args: Any) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts and tables fit each other."""
    if have_expected_ranks(args):
        yield from packed_sequence_conditions(args, args.queries.shape[0], args.key_cache.shape[1])


def batch_record(args: Any, **fields: Any) -> PagedAttention:
    """Returns the paged-attention record of a call, with the extra fields of one operation."""
    return PagedAttention(
        query=args.queries,
        key_pages=args.key_cache,
        value_pages=args.value_cache,
        block_tables=args.block_tables,
        kv_lens=args.kv_lens,
        query_start=args.query_start_loc,
        kv_layout="pshd",
        kv_heads=None,
        causal=args.causal,
        **score_fields(args, args.queries, args.queries.shape[-1]),
        **fields,
    )
