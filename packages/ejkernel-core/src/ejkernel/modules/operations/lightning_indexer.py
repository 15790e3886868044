"""The lightning indexer: the keys that sparse attention reads, by the scores of a few small heads."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Integer

from ejkernel.families import lightning_indexer as family
from ejkernel.modules.operations.cases import lightning_indexer as cases
from ejkernel.modules.operations.configs import LightningIndexerConfig
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.dense_arguments import check_cum_seqlens
from ejkernel.modules.operations.shared.key_ranges import key_ranges
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
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
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition


@document_options
def lightning_indexer(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s d"],
    weights: Float[Array, "b t h"],
    cum_seqlens_q: Integer[Array, " n"] | None = None,
    cum_seqlens_k: Integer[Array, " n"] | None = None,
    *,
    top_k: int = 2048,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    platform: str | None = None,
    cfg: LightningIndexerConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Int32[Array, "b t k"], Float[Array, "b t k"]]:
    """Returns the keys with the largest indexer scores of each query (DeepSeek-V3.2), in memory linear in T.

    Shape letters: B batch, T queries, S keys, H indexer heads, D head size. The score of query t and key s is

        I[t, s] = sum over h of weights[t, h] * max(0, softmax_scale * <query[t, h], key[s]>)

    in float32. The indices are what `token_sparse_attention` reads. No array [T, S] is in memory: tiles of scores are
    merged into the keys that each query has selected so far.

    Of equal scores, the key with the lower index is selected first, so two runs and two backends select the same keys
    wherever scores are equal. -0 equals 0. NaN of either sign is above infinity, so a key with a score of NaN is
    selected first. Queries select keys of their own packed sequence only.

    Over devices, batch and the queries' tokens can be split.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, D], dtype of query; one key for all heads.
        weights: [B, T, H] floating, of any sign; may be float32 with any query. DeepSeek-V3.2 multiplies its projection
            by `H ** -0.5`, which the loss of the scores depends on.
        cum_seqlens_q: Cumulative query lengths, int. With B = 1, [N + 1] for N packed sequences that do not see each
            other; with B > 1, [B + 1], row b holding one sequence followed by padding. May be traced; values that are
            not are checked, for which an eager call waits. Sequences may be empty.
        cum_seqlens_k: The same for keys; None means those of the queries.
        top_k: K, how many keys are selected per query, at least 1. May be larger than S.
        softmax_scale: Factor on the products; None means `D ** -0.5`.
        causal: Key position at most query position. The last query of a sequence has the position of its last key
            (bottom-right), so that the queries may be the newest tokens of a longer context.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive,
            by these positions; None on a side leaves it open.

    Returns:
        Two arrays [B, T, K], by descending score:

        - indices, int32: indices into axis S of key, also for packed sequences; -1 where a query has fewer keys;
        - scores, float32 (float64 for float64): -inf where there is no key. Differentiable in query, key and weights;
          what is selected has no gradient.

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
            sliding_window=as_window("sliding_window", self.sliding_window),
        )
        # The call goes on under a trace, where no values can be seen.
        for name, array in _cumulative_length_arguments(self):
            check_cumulative_lengths(name, getattr(self, name), *array.shape[:2])


def _cumulative_length_arguments(args: LightningIndexerArguments) -> Iterable[tuple[str, Any]]:
    """Yields the names of the cumulative lengths of a call, with the arrays whose tokens they count."""
    if have_ranks(args, query=4, key=3):
        pairs = (("cum_seqlens_q", args.query), ("cum_seqlens_k", args.key))
        yield from ((name, array) for name, array in pairs if getattr(args, name) is not None)


def validate(args: LightningIndexerArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("query", "B T H D"), ("key", "B S D"), ("weights", "B T H")):
        check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("query", args.query, "B T H D", "H D")
    for name in ("query", "weights"):
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_same_dtype({"query": args.query, "key": args.key})
    check_cum_seqlens(args, sizes)


def conditions(args: LightningIndexerArguments) -> Iterable[Condition]:
    """Yields the conditions that cumulative lengths fit the arrays."""
    for name, array in _cumulative_length_arguments(args):
        yield from cumulative_length_conditions(name, getattr(args, name), *array.shape[:2])


def lower(args: LightningIndexerArguments) -> family.LightningIndexer:
    """Returns the record of a call: the range of keys that each query may select."""
    lengths = None
    if args.cum_seqlens_q is not None:
        lengths = args.cum_seqlens_q, args.cum_seqlens_q if args.cum_seqlens_k is None else args.cum_seqlens_k
    batch, queries, _, channels = args.query.shape
    starts, ends = key_ranges(
        (batch, queries, args.key.shape[1]), lengths, causal=args.causal, sliding_window=args.sliding_window
    )
    return family.LightningIndexer(
        query=args.query,
        key=args.key,
        weights=args.weights,
        key_starts=starts,
        key_ends=ends,
        top_k=args.top_k,
        softmax_scale=channels**-0.5 if args.softmax_scale is None else args.softmax_scale,
    )


class LightningIndexer(Kernel[LightningIndexerConfig, tuple[Array, Array]]):
    """Wraps `lightning_indexer` in an object that an `Executor` can call."""


OP = Op(
    arguments=LightningIndexerArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(LightningIndexerArguments),
    make_inputs=cases.make_inputs,
)
LightningIndexer.op = OP
