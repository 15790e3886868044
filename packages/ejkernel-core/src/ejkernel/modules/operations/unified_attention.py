"""Prefill and decoding mixed in one batch, over separate key and value caches that are only read."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import UnifiedAttentionConfig
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.mixed_batches import batch_conditions, batch_record, check_batch
from ejkernel.modules.operations.shared.paged_arguments import (
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import qq_bias_axes, set_canonical_score_arguments
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.types.pair_functions import PairFunction


@document_options
def unified_attention(
    queries: Float[Array, "t h d"],
    key_cache: Float[Array, "p s g d"],
    value_cache: Float[Array, "p s g v"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"],
    query_start_loc: Integer[Array, " n"],
    alibi_slopes: Float[Array, " h"] | None = None,
    qq_bias: Float[Array, "i i"] | Float[Array, "r i i"] | Float[Array, " pairs"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    num_par_softmax_segments: int | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: UnifiedAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "t h v"] | WithLse:
    """Computes attention of the newest tokens of many sequences over their cached keys (Kwon et al. 2023).

    Shape letters: T query rows, N sequences, P pages of S slots, H query heads, Hk KV heads, D head size, Dv value
    size. Sequence n has rows `query_start_loc[n] : query_start_loc[n + 1]`, its newest tokens, which the caches hold
    already: row i of q is at position `kv_lens[n] - q + i`. The token at position k lies in page
    `block_tables[n, k // S]`, slot `k % S`. The formula is in `ejkernel.families.paged_attention`: the biases are part
    of the score that the soft cap is applied to, where vLLM's kernel adds them afterwards. Not differentiable.

    Over devices, heads can be split.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        key_cache: [P, S, Hk, D] floating.
        value_cache: [P, S, Hk, Dv], dtype of key_cache.
        kv_lens: [N] int, tokens of each sequence, its queries included.
        block_tables: [N, pages per sequence] int. Entries past a sequence's length are ignored; within it, an entry
            that is no page of the cache is a page without keys.
        query_start_loc: [N + 1] int, not decreasing. Sequences may have no queries.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j of the same sequence; none beyond Q.
            -inf masks. [N, Q, Q] has a table for each sequence, such as the tree of each request. [L] has
            these packed: the q * q entries of each sequence with q rows, one sequence after the other.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them. A kernel can read them once for the batch (cascade; Ye et al. 2025, arXiv:2501.01005).
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        causal: Key position at most query position.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        seq_threshold_3d: From how many sequences on a kernel does not split their keys (tuning); short for the field of
            `cfg`.
        num_par_softmax_segments: Independent partial softmaxes per sequence (tuning); as above.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        score_mod: `(score, n, h, q_pos, k_pos) -> score`, a function of scalars that replaces each score after the soft
            cap: n is the sequence, h the query head, q_pos and k_pos are positions in the sequence, not in pages.
        mask_mod: `(n, h, q_pos, k_pos) -> bool`, True where a pair attends; applies together with everything else. Both
            functions may close over arrays.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, Dv] in queries' dtype; rows that belong to no sequence are 0.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import unified_attention

        queries = jax.random.normal(jax.random.key(0), (8, 4, 64))
        cache = jax.random.normal(jax.random.key(1), (16, 16, 2, 64))
        lengths = jnp.array([20, 33])  # 7 new tokens of 20, and 1 of 33
        tables = jnp.array([[3, 5, 0], [1, 2, 9]])
        output = unified_attention(queries, cache, cache, lengths, tables, jnp.array([0, 7, 8]), sliding_window=16)
        assert output.shape == (8, 4, 64)
        ```
    """
    return run_operation(OP, locals())


class UnifiedAttentionArguments(ArgumentRecord, of=unified_attention):
    """The arguments of a call of `unified_attention`."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(self, **pair_functions(self.score_mod, self.mask_mod, self.queries))


def finish(args: UnifiedAttentionArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns."""
    return with_lse(args, output[0], output[1])


def configure(args: UnifiedAttentionArguments, cfg: UnifiedAttentionConfig | None) -> UnifiedAttentionConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    tuning = {"num_par_softmax_segments": args.num_par_softmax_segments}
    return with_tuning_arguments(UnifiedAttentionConfig, cfg, seq_threshold_3d=args.seq_threshold_3d, **tuning)


class UnifiedAttention(Kernel[UnifiedAttentionConfig, Array]):
    """Wraps `unified_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=UnifiedAttentionArguments,
    family=paged_attention.FAMILY,
    validate=check_batch,
    lower=batch_record,
    conditions=batch_conditions,
    conventions=conventions.page_sentences,
    cases=paged_cases.unified_cases(UnifiedAttentionArguments),
    make_inputs=paged_inputs.make_inputs,
    axes={"qq_bias": "i j", "softmax_aux": "h sinks"},
    axes_of=qq_bias_axes,
    finish=finish,
    output="t h v",
    lse="t h",
    configure=configure,
)
UnifiedAttention.op = OP
