"""The terms that operations over pages share in their scores: scales of 8-bit caches, biases, windows, a shared
prefix.

An operation takes those of the arguments here that mean something for it, by the same names; the functions look only at
the arguments that it has.

| argument | meaning |
|---|---|
| `softmax_scale` | factor on the scores |
| `k_scale`, `v_scale` | what stored keys and values were divided by: factors on the scores and on the output |
| `alibi_slopes` | [H] slopes m of the term `m * (k - c)` |
| `qq_bias` | for pairs of new tokens: [Q, Q], or a table per sequence as [N, Q, Q] or packed, [sum of q_n ** 2] |
| `logits_soft_cap` | cap of the scores with their biases |
| `sliding_window`, `chunk_size` | which keys a query attends to, by position |
| `softmax_aux` | sink logits in the denominator |
| `shared_prefix` | tokens that all sequences begin with |
| `score_mod`, `mask_mod` | functions of a score, the sequence, the head and the positions of query and key |
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import is_symbolic
from ejkernel.modules.operations.shared.conditions import (
    PagedBatch,
    packed_qq_bias_conditions,
    paged_batch_conditions,
    shared_prefix_conditions,
)
from ejkernel.modules.operations.shared.paged_arguments import (
    accept_mask_value,
    as_cache_window,
    as_count,
    as_score_scale,
    as_soft_cap,
    check_per_head,
    per_head,
    set_canonical_fields,
)
from ejkernel.modules.operations.shared.shapes import as_flag, as_number, check_dtype, check_shape
from ejkernel.modules.operations.shared.sinks import check_sinks, sink_logits
from ejkernel.ops.values import Condition


def _as_positive_scale(name: str, scale: Any) -> float | None:
    return None if scale is None else as_number(name, scale, greater_than=0)


def _as_int32_prefix(name: str, prefix: Any) -> Any:
    return np.int32(prefix) if isinstance(prefix, int) else prefix


CANONICAL_VALUE_FUNCTIONS: dict[str, Callable[[str, Any], Any]] = {
    "softmax_scale": as_score_scale,
    "q_scale": _as_positive_scale,
    "k_scale": _as_positive_scale,
    "v_scale": _as_positive_scale,
    "shared_prefix": _as_int32_prefix,
    "chunk_size": as_count,
    "sliding_window": as_cache_window,
    "logits_soft_cap": as_soft_cap,
    "mask_value": accept_mask_value,
    "return_lse": as_flag,
    "causal": as_flag,
    "optimized": as_flag,
    "inline_seq_dim": as_flag,
    "seq_threshold_3d": functools.partial(as_count, minimum=0),
    "num_par_softmax_segments": as_count,
    "num_kv_splits": as_count,
    "max_context_len": as_count,
    "pages_per_compute_block": as_count,
    "vmem_limit_bytes": as_count,
}
"""Argument -> (its name, what was given) -> its canonical value."""


def set_canonical_score_arguments(args: Any, **others: Any) -> None:
    """Sets the canonical values of a record that is being constructed.

    Args:
        args: The argument record.
        **others: Values of arguments that only this operation has, or that it reads in a different way.
    """
    terms = {
        name: canonical
        for name, canonical in CANONICAL_VALUE_FUNCTIONS.items()
        if name not in others and hasattr(args, name)
    }
    set_canonical_fields(
        args, **{name: canonical(name, getattr(args, name)) for name, canonical in terms.items()}, **others
    )


class CanonicalScoreArguments:
    """Gives an argument record, as its first base, canonical values of all terms."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(self)


def check_score_arguments(args: Any, sizes: dict[str, int]) -> None:
    """Checks the arrays among the terms.

    Args:
        args: The argument record.
        sizes: Known sizes: H, and N if sequences can have tables of biases of their own.

    Raises:
        ValueError: One of them is wrong on every backend.
    """
    check_sinks(_get(args, "softmax_aux"), sizes["H"])
    check_per_head("alibi_slopes", _get(args, "alibi_slopes"), sizes)
    prefix, bias = _get(args, "shared_prefix"), _get(args, "qq_bias")
    if prefix is not None:
        check_shape("shared_prefix", prefix, "", {})
        check_dtype("shared_prefix", prefix, jnp.integer, "an integer dtype")
    if bias is not None:
        _check_qq_bias(bias, sizes)


def _check_qq_bias(bias: Any, sizes: dict[str, int]) -> None:
    shape = getattr(bias, "shape", ())
    largest = {"Q": max((0, *shape[-2:]))}
    axes = {1: "L", 3: "N Q Q"}.get(len(shape), "Q Q") if "N" in sizes else "Q Q"
    check_shape("qq_bias", bias, axes, {**largest, "N": sizes["N"]} if axes == "N Q Q" else largest)
    check_dtype("qq_bias", bias, jnp.floating, "a floating dtype")


def qq_bias_axes(args: Any) -> dict[str, str]:
    """Returns the axis letters of `qq_bias` if each sequence has its own."""
    letters = {1: "pairs", 3: "r i j"}.get(len(getattr(_get(args, "qq_bias"), "shape", ())))
    return {} if letters is None else {"qq_bias": letters}


def packed_sequence_conditions(
    args: Any, rows: int, page_size: int, live_argument: str | None = None
) -> Iterable[Condition]:
    """Yields what lengths, starts, tables, counts and the shared prefix of packed sequences have to satisfy.

    Args:
        args: The argument record, with `kv_lens`, `query_start_loc` and `block_tables`.
        rows: Query rows.
        page_size: Slots of a page.
        live_argument: The argument that says how many of the sequences are live; None for all.
    """
    batch = PagedBatch(
        lengths=("kv_lens", args.kv_lens),
        starts=("query_start_loc", args.query_start_loc),
        tables=("block_tables", args.block_tables),
        rows=rows,
        page_size=page_size,
        num_live=None if live_argument is None else (live_argument, getattr(args, live_argument)),
    )
    yield from paged_batch_conditions(batch)
    tables, lengths = (getattr(x, "shape", ()) for x in (batch.tables[1], batch.lengths[1]))
    if _get(args, "shared_prefix") is not None and not any(map(is_symbolic, (*tables, *lengths))):
        capacity = math.prod(tables) // max(1, *lengths) * page_size
        yield from shared_prefix_conditions(args.shared_prefix, batch.lengths, capacity, batch.starts, batch.num_live)
    if len(getattr(_get(args, "qq_bias"), "shape", ())) == 1:
        yield from packed_qq_bias_conditions(args.qq_bias.shape[0], batch.starts, batch.num_live)


def score_fields(args: Any, query: Any, size: int) -> dict[str, Any]:
    """Returns the fields of a paged-attention record that the terms of a call have.

    Args:
        args: The argument record.
        query: The query of the record, [T, H, D].
        size: The size whose `-0.5`th power scales the scores by default.
    """
    scale = args.softmax_scale
    scale = size**-0.5 if scale is None else scale
    for name in ("q_scale", "k_scale"):
        scale = scale * (_get(args, name) or 1.0)
    prefix, value_scale = _get(args, "shared_prefix"), _get(args, "v_scale")
    return {
        "softmax_scale": scale,
        "softmax_aux": sink_logits(_get(args, "softmax_aux"), query.shape[-2], query.dtype),
        "alibi_slopes": per_head(_get(args, "alibi_slopes"), query),
        "qq_bias": _get(args, "qq_bias"),
        "shared_prefix": None if prefix is None else jnp.asarray(prefix, jnp.int32),
        "chunk_size": _get(args, "chunk_size"),
        "sliding_window": args.sliding_window,
        "score_mod": _get(args, "score_mod"),
        "mask_mod": _get(args, "mask_mod"),
        "logits_soft_cap": args.logits_soft_cap,
        "value_scale": 1.0 if value_scale is None else value_scale,
    }


def _get(args: Any, name: str) -> Any:
    """Returns an argument; None where the operation has none of the name."""
    return getattr(args, name, None)
