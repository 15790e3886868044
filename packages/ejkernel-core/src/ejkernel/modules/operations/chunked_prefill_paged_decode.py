"""Prefill and decoding mixed in one batch, over separate caches that the new tokens are first written into."""

from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import ChunkedPrefillPagedDecodeConfig
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.mixed_batches import batch_conditions, batch_record, check_batch
from ejkernel.modules.operations.shared.paged_arguments import (
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import CanonicalScoreArguments
from ejkernel.modules.operations.shared.shapes import check_same_dtype, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def chunked_prefill_paged_decode(
    queries: Float[Array, "t h d"],
    keys: Float[Array, "t g d"],
    values: Float[Array, "t g v"],
    key_cache: Float[Array, "p s g d"],
    value_cache: Float[Array, "p s g v"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"],
    query_start_loc: Integer[Array, " n"],
    alibi_slopes: Float[Array, " h"] | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    seq_threshold_3d: int | None = None,
    num_par_softmax_segments: int | None = None,
    qq_bias: Float[Array, "i i"] | Float[Array, "r i i"] | Float[Array, " pairs"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: ChunkedPrefillPagedDecodeConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h v"], Float[Array, "p s g d"], Float[Array, "p s g v"]] | WithLse:
    """Writes the new tokens of many sequences into their pages, then attends (Kwon et al. 2023, arXiv:2309.06180).

    `unified_attention` after a write: row i of q of sequence n, `query_start_loc[n] + i`, is the token at position
    `kv_lens[n] - q + i`, whose key and value go to page `block_tables[n, k // S]`, slot `k % S`. Nothing but these
    slots is written. Call under `jax.jit` with `donate_argnums` for both caches and use the returned ones: the update
    is then in place. A call outside of jit copies the caches. Not differentiable.

    Over devices, heads can be split.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        keys: [T, Hk, D] new keys, dtype of key_cache.
        values: [T, Hk, Dv] new values, dtype of key_cache.
        key_cache: [P, S, Hk, D] floating.
        value_cache: [P, S, Hk, Dv], dtype of key_cache.
        kv_lens: [N] int, tokens of each sequence, the new ones included.
        block_tables: [N, pages per sequence] int. Entries past a sequence's length are not read. Within it, an entry
            that is no page of the cache counts as a page without keys, and new tokens that belong there are dropped.
        query_start_loc: [N + 1] int, not decreasing. Sequences may have no rows.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its new ones.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        causal: Key position at most query position.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`, applied to the score with its alibi term.
        seq_threshold_3d: From how many sequences on a kernel does not split their keys (tuning); short for the field of
            `cfg`.
        num_par_softmax_segments: Independent partial softmaxes per sequence (tuning); as above.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j of the same sequence; none beyond Q.
            -inf masks. [N, Q, Q] has a table for each sequence, such as the tree of each request. [L] has
            these packed: the q * q entries of each sequence with q rows, one sequence after the other.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, Dv] in queries' dtype, where rows that belong to no sequence are 0; the key cache and the value cache.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import chunked_prefill_paged_decode

        queries = jax.random.normal(jax.random.key(0), (8, 4, 64))
        tokens = jax.random.normal(jax.random.key(1), (8, 2, 64))
        caches = jnp.zeros((16, 16, 2, 64)), jnp.zeros((16, 16, 2, 64))
        lengths = jnp.array([7, 1])  # a prompt of 7 tokens, and one of 1
        tables = jnp.array([[3, 0], [5, 0]])
        step = jax.jit(chunked_prefill_paged_decode, donate_argnums=(3, 4))
        output, *caches = step(queries, tokens, tokens, *caches, lengths, tables, jnp.array([0, 7, 8]))
        assert output.shape == (8, 4, 64)
        ```
    """
    return run_operation(OP, locals())


class ChunkedPrefillPagedDecodeArguments(CanonicalScoreArguments, ArgumentRecord, of=chunked_prefill_paged_decode):
    """The arguments of a call of `chunked_prefill_paged_decode`."""


def validate(args: ChunkedPrefillPagedDecodeArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes = check_batch(args)
    check_shape("keys", args.keys, "T Hk D", sizes)
    check_shape("values", args.values, "T Hk Dv", sizes)
    check_same_dtype({"key_cache": args.key_cache, "keys": args.keys, "values": args.values})


def lower(args: ChunkedPrefillPagedDecodeArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    return batch_record(args, new_keys=args.keys, new_values=args.values)


def finish(args: ChunkedPrefillPagedDecodeArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output and the caches."""
    return with_lse(args, output[0], output[1], output[2], output[3])


def configure(
    args: ChunkedPrefillPagedDecodeArguments, cfg: ChunkedPrefillPagedDecodeConfig | None
) -> ChunkedPrefillPagedDecodeConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    tuning = {"num_par_softmax_segments": args.num_par_softmax_segments}
    return with_tuning_arguments(ChunkedPrefillPagedDecodeConfig, cfg, seq_threshold_3d=args.seq_threshold_3d, **tuning)


class ChunkedPrefillPagedDecode(Kernel[ChunkedPrefillPagedDecodeConfig, tuple[Array, Array, Array]]):
    """Wraps `chunked_prefill_paged_decode` in an object that an `Executor` can call."""


OP = Op(
    arguments=ChunkedPrefillPagedDecodeArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=batch_conditions,
    conventions=conventions.page_sentences,
    cases=paged_cases.chunked_prefill_cases(ChunkedPrefillPagedDecodeArguments),
    make_inputs=paged_inputs.make_inputs,
    axes={"softmax_aux": "h sinks"},
    finish=finish,
    output=("t h v", "p s g d", "p s g v"),
    lse="t h",
    configure=configure,
)
ChunkedPrefillPagedDecode.op = OP
