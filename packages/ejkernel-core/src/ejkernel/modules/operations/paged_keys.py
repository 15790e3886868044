"""`flash_attention` over a cache of pages: a call of `unified_attention`."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.lse import with_lse
from ejkernel.modules.operations.shared.shapes import check_dtype, check_shape, got
from ejkernel.ops.model import Op
from ejkernel.ops.values import Condition, are_integer_arrays
from ejkernel.types.arguments import non_default_fields

_INT32_MAX = 2**31 - 1
_OPTIONAL_ARGUMENTS_WITH_PAGES = frozenset(
    {"block_tables", "cum_seqlens_q", "cum_seqlens_k", "softmax_scale", "softmax_aux", "causal", "sliding_window"}
    | {"logits_soft_cap", "return_lse", "dropout_prob"}
)
"""The optional arguments that a call with pages may give."""


def paged_call(args: Any, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    """Returns the call of `unified_attention` that a call with `block_tables` means.

    Args:
        args: Argument record of `flash_attention`.
        options: Its call options.

    Raises:
        ValueError: A shape is wrong.
        NotImplementedError: An argument has no meaning with pages.
    """
    # Here, because importing an operation imports no other.
    from ejkernel.modules.operations.unified_attention import UnifiedAttentionArguments

    _check_paged_call(args, options)
    batch, tokens, heads, size = args.query.shape
    tables = args.block_tables
    full: Any = np.full(tables.shape[:1], tables.shape[1] * args.key.shape[1], np.int32)
    starts: Any = np.arange(batch + 1, dtype=np.int32) * tokens if args.cum_seqlens_q is None else args.cum_seqlens_q
    window = args.sliding_window
    scalars: dict[str, Any] = {"softmax_scale": args.softmax_scale, "logits_soft_cap": args.logits_soft_cap}
    record = UnifiedAttentionArguments(
        queries=args.query.reshape(batch * tokens, heads, size),
        key_cache=args.key,
        value_cache=args.value,
        kv_lens=full if args.cum_seqlens_k is None else jnp.diff(args.cum_seqlens_k),
        block_tables=tables,
        query_start_loc=starts,
        softmax_aux=args.softmax_aux,
        sliding_window=None if window is None else (window[0], 0),
        return_lse=args.return_lse,
        **scalars,
    )
    return _operation_with_batched_output(batch, tokens), record, options


def page_conditions(args: Any) -> Iterable[Condition]:
    """Yields the conditions that the cumulative lengths of a call over pages fit the query rows and the tables."""
    (batch, tokens), tables, ends = args.query.shape[:2], args.block_tables, args.cum_seqlens_k
    starts = args.cum_seqlens_q
    for name, bounds, most in (("cum_seqlens_q", starts, batch * tokens), ("cum_seqlens_k", ends, _INT32_MAX)):
        if bounds is not None:
            now = (
                dataclasses.replace(one, is_checked_by_record=False)
                for one in cumulative_length_conditions(name, bounds, 1, most)
            )
            yield from now
    if not have_ranks(args, block_tables=2) or not are_integer_arrays(ends) or ends.shape != (tables.shape[0] + 1,):
        return
    capacity, rows = tables.shape[1] * args.key.shape[1], () if starts is None else (starts,)
    if rows and (not are_integer_arrays(*rows) or rows[0].shape != ends.shape):
        return

    def lengths_are_valid(xp: Any, keys: Any, *queries: Any) -> Any:
        steps = keys[1:] - keys[:-1]
        least = queries[0][1:] - queries[0][:-1] if queries else tokens
        return xp.all((steps >= least) & (steps <= capacity))

    wants = (
        f"steps of at least each sequence's queries and at most the {capacity} tokens that block_tables has pages for"
    )
    yield Condition(name="cum_seqlens_k", arrays=(ends, *rows), holds=lengths_are_valid, wants=wants)


def _check_paged_call(args: Any, options: dict[str, Any]) -> None:
    sizes: dict[str, int] = {}
    check_shape("query", args.query, "B T H D", sizes)
    for name in ("key", "value"):
        check_shape(name, getattr(args, name), "pages slots Hk Dv" if name == "value" else "pages slots Hk D", sizes)
    packed = args.cum_seqlens_q is not None
    if packed and sizes["B"] != 1:
        raise ValueError(
            f"cum_seqlens_q: got a value with block_tables and {sizes['B']} rows, wants one row with all sequences"
        )
    check_shape("block_tables", args.block_tables, "N max_blocks" if packed else "B max_blocks", sizes)
    check_dtype("block_tables", args.block_tables, jnp.integer, "an integer dtype")
    unsupported = [name for name in non_default_fields(args) if name not in _OPTIONAL_ARGUMENTS_WITH_PAGES]
    unsupported += [name for name in ("mesh", "in_specs", "out_specs") if options[name] is not None]
    if unsupported:
        raise NotImplementedError(
            f"{unsupported[0]}: got a value with block_tables, which flash_attention does not support; "
            "unified_attention has the arguments of attention over pages"
        )
    if not args.causal and sizes["T"] != 1:
        raise NotImplementedError(
            f"causal: got False with block_tables and {sizes['T']} queries per row, wants True: queries are the last "
            "tokens of their sequence in the cache"
        )
    if args.sliding_window is not None and args.sliding_window[1] is not None and args.sliding_window[1] < 0:
        raise NotImplementedError(f"sliding_window: got {got(args.sliding_window)}, wants one that ends at the query")


@functools.cache
def _operation_with_batched_output(batch: int, tokens: int) -> Op:
    """Returns the operation with rows of queries in its result."""

    from ejkernel.modules.operations.unified_attention import OP

    def finish(args: Any, value: Any) -> Any:
        output, lse = (x.reshape(batch, tokens, *x.shape[1:]) for x in value[:2])
        return with_lse(args, output, lse.swapaxes(1, 2))

    return dataclasses.replace(OP, finish=finish)
