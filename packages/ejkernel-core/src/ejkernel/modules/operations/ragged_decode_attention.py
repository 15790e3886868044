"""Decoding over a dense cache: one query token a batch row, which attends to a range of the row's keys."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import RaggedDecodeAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks, value_range_condition
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    check_caches,
    check_integer_array,
    check_query,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    score_fields,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.shapes import as_window, check_not_empty, got
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition


@document_options
def ragged_decode_attention(
    query: Float[Array, "r h d"] | Float[Array, "r 1 h d"],
    key: Float[Array, "r s g d"],
    value: Float[Array, "r s g v"],
    sequence_start: Integer[Array, " r"],
    sequence_end: Integer[Array, " r"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedDecodeAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "r h v"] | Float[Array, "r 1 h v"] | WithLse:
    """Computes attention of the newest token of every batch row over keys `start` to `end - 1` (Milakov & Gimelshein
    2018).

    Shape letters: B batch rows, S keys, H query heads, Hk KV heads, D head size, Dv value size. The query's position is
    `sequence_end - 1`. The formula is in `ejkernel.families.paged_attention`, of which a batch row is a sequence with
    one page. Not differentiable.

    Over devices, batch and heads can be split; the spec of the query is that of [B, H, D].

    Args:
        query: [B, H, D] or [B, 1, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D] floating; H is a multiple of Hk.
        value: [B, S, Hk, Dv], dtype of key.
        sequence_start: [B] int, first key of each row.
        sequence_end: [B] int, one more than the last; an empty range gives 0.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        sliding_window: (left, right): keys from `end - 1 - left` to `end - 1 + right`, inclusive; None on a side leaves
            it open.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, H, Dv] in query's dtype; [B, 1, H, Dv] for a query of rank 4.
        With `return_lse`, lse [B, H] (or [B, 1, H]) after the output: float32 (float64 for float64),
        natural logarithm, -inf where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_decode_attention

        query = jax.random.normal(jax.random.key(0), (2, 8, 64))
        cache = jax.random.normal(jax.random.key(1), (2, 128, 2, 64))
        output = ragged_decode_attention(query, cache, cache, jnp.array([0, 5]), jnp.array([128, 40]))
        assert output.shape == (2, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class RaggedDecodeAttentionArguments(ArgumentRecord, of=ragged_decode_attention):
    """The arguments of a call of `ragged_decode_attention`."""

    def __post_init__(self) -> None:
        window: Any = self.sliding_window
        if window is not None and not isinstance(window, tuple):
            raise ValueError(
                f"sliding_window: got {got(window)}, wants (left, right): an int means (w, w) in operations on dense "
                "keys and the newest w keys in those on a cache"
            )
        set_canonical_score_arguments(self, sliding_window=as_window("sliding_window", window))


def validate(args: RaggedDecodeAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {"1": 1}
    check_query("query", args.query, "B 1 H D" if getattr(args.query, "ndim", 3) == 4 else "B H D", sizes)
    # The record sees batch rows as pages, and keys as their slots.
    batch = {"P": sizes["B"], "H": sizes["H"], "D": sizes["D"]}
    check_caches("query", {"key": args.key, "value": args.value}, "pshd", batch)
    for name in ("sequence_start", "sequence_end"):
        check_integer_array(name, getattr(args, name), "B", sizes)
        check_not_empty(name, getattr(args, name), "B", "B")
    check_score_arguments(args, sizes)


def conditions(args: RaggedDecodeAttentionArguments) -> Iterable[Condition]:
    """Ranges of keys lie within the rows."""
    if have_ranks(args, key=4, sequence_start=1, sequence_end=1):
        keys = args.key.shape[1]
        yield from value_range_condition("sequence_start", args.sequence_start, 0, keys, "first keys")
        yield from value_range_condition("sequence_end", args.sequence_end, 0, keys, "ends")


def lower(args: RaggedDecodeAttentionArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    query = args.query.reshape(args.query.shape[0], *args.query.shape[-2:])
    return PagedAttention(
        query=query,
        key_pages=args.key,
        value_pages=args.value,
        block_tables=None,
        kv_lens=args.sequence_end,
        query_start=None,
        kv_layout="pshd",
        kv_heads=None,
        kv_starts=args.sequence_start,
        **score_fields(args, query, query.shape[-1]),
    )


def finish(args: RaggedDecodeAttentionArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output, with the query's axes."""
    arrays = (x[:, None] if args.query.ndim == 4 else x for x in output[:2])
    return with_lse(args, *arrays)


class RaggedDecodeAttention(Kernel[RaggedDecodeAttentionConfig, Array]):
    """Wraps `ragged_decode_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=RaggedDecodeAttentionArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=paged_cases.ragged_decode_cases(RaggedDecodeAttentionArguments),
    make_inputs=paged_inputs.make_ragged_decode_inputs,
    axes={"softmax_aux": "h n"},
    finish=finish,
    output="r h v",
    lse="r h",
)
RaggedDecodeAttention.op = OP
