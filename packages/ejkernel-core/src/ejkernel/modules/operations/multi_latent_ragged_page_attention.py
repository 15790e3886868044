"""Latent attention of prompts and single tokens in one batch, over pages that the new tokens are first written into."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from ejkernel.arithmetic import cdiv
from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.pages import LANES, values_per_32_bits
from ejkernel.modules.operations.cases import paged_latent as cases
from ejkernel.modules.operations.configs import MultiLatentRaggedPageAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    check_integer_array,
    check_page_tables,
    rounded_as_cache,
    table_axes,
)
from ejkernel.modules.operations.shared.paged_terms import (
    CanonicalScoreArguments,
    check_score_arguments,
    packed_sequence_conditions,
    score_fields,
)
from ejkernel.modules.operations.shared.shapes import (
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
def multi_latent_ragged_page_attention(
    queries_nope: Float[Array, "t h r"],
    queries_pe: Float[Array, "t h c"],
    keys_values: Num[Array, "t r"],
    keys_pe: Num[Array, "t c"],
    kv_cache: Num[Array, "p s pack lanes"],
    kv_lens: Integer[Array, " n"],
    block_tables: Integer[Array, "n k"] | Integer[Array, " n*k"],
    query_start_loc: Integer[Array, " n+1"],
    distribution: Integer[Array, " 3"],
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    qq_bias: Float[Array, "i i"] | Float[Array, "n i i"] | Float[Array, " pairs"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: MultiLatentRaggedPageAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h r"], Num[Array, "p s pack lanes"]] | WithLse:
    """Writes new tokens into a cache of pages, then computes absorbed latent attention (DeepSeek-V2, 2024,
    arXiv:2405.04434).

    A token has one row in the cache, which all query heads share: its latent vector, from which a model reads keys and
    values of all heads, and a key with rotary position. The model takes the query of head h to the latent space,
    `queries_nope_h = w_kc_h q_h`; here,

        s_hj = softmax_scale * (queries_nope_h . latent_j + queries_pe_h . rope_j)
        o_h  = sum_j softmax(s_h)_j latent_j

    and the model takes `o_h` to the head's values by `w_vc_h`. `mla_decode` does both around a dense cache.

    Shape letters: T rows, N sequences, P pages of S slots, H query heads, R latent size, Dr size of the rotary part.
    Sequences, lengths, tables, starts and distribution are those of `ragged_page_attention_v3`: sequence n has rows
    `query_start_loc[n] : query_start_loc[n + 1]`, and row i of q is its token at position `kv_lens[n] - q + i`, which
    attends to those up to itself. The formula is in `ejkernel.families.paged_attention`. Not differentiable.

    With `pack = 32 // bits(cache dtype)` a cache is [P, S / pack, pack, lanes]; axes 1 and 2 together are the slots. A
    row is the latent vector, filled with 0 to a multiple of 128, then the rotary part, filled in the same way. Only
    the rows of the new tokens are written. Call under `jax.jit` with `donate_argnums` for the cache and use the
    returned one: the update is then in place.

    Over devices, query heads can be split.

    Args:
        queries_nope: [T, H, R] float16, bfloat16, float32 or float64, packed, in the latent space.
        queries_pe: [T, H, Dr] with rotary position, dtype of queries_nope.
        keys_values: [T, R] new latent vectors, dtype of kv_cache.
        keys_pe: [T, Dr] new keys with rotary position, dtype of kv_cache.
        kv_cache: [P, S / pack, pack, lanes] floating or int8, as above.
        kv_lens: [N] int, tokens of each sequence, the new ones included.
        block_tables: [N, K] or flat [N * K] int, K pages per sequence. Entries past a sequence's length are neither
            looked at nor written through; within it, an entry that is no page of the cache is a page without keys.
        query_start_loc: [N + 1] int, not decreasing up to the live sequences. Sequences may have no rows.
        distribution: [3] int (i, j, k): k sequences are live; i and j are advice for kernels.
        softmax_scale: Factor on the scores; None means `(R + Dr) ** -0.5`. Models want `(Dn + Dr) ** -0.5` with the
            size Dn of their heads before absorption.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`, applied after all scales.
        mask_value: Score of masked keys, at most -10000: they weigh nothing.
        q_scale: Queries are divided by it and rounded to the cache's dtype, for int8 to the nearest of -128 to 127;
            scores are multiplied by it.
        k_scale: Factor on the scores, by which rows were divided before they were stored.
        v_scale: Factor on the output, by which rows were divided.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j of the same sequence; none beyond Q.
            -inf masks. [N, Q, Q] has a table for each sequence, such as the tree of each request. [L] has
            these packed: the q * q entries of each sequence with q rows, one sequence after the other.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, R] in the queries' dtype, where rows that belong to no sequence are 0, and the cache.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import multi_latent_ragged_page_attention

        keys = jax.random.split(jax.random.key(0), 4)
        nope, rope = jax.random.normal(keys[0], (8, 4, 96)), jax.random.normal(keys[1], (8, 4, 16))
        latent, key = jax.random.normal(keys[2], (8, 96)), jax.random.normal(keys[3], (8, 16))
        cache = jnp.zeros((16, 16, 1, 128 + 128))  # float32: pack is 1
        lengths, tables = jnp.array([7, 1]), jnp.array([3, 0, 5, 0])
        step = jax.jit(multi_latent_ragged_page_attention, donate_argnums=4)
        starts, distribution = jnp.array([0, 7, 8]), jnp.array([0, 0, 2])
        output, cache = step(nope, rope, latent, key, cache, lengths, tables, starts, distribution)
        assert output.shape == (8, 4, 96)
        ```
    """
    return run_operation(OP, locals())


class MultiLatentRaggedPageAttentionArguments(
    CanonicalScoreArguments, ArgumentRecord, of=multi_latent_ragged_page_attention
):
    """The arguments of a call of `multi_latent_ragged_page_attention`."""


def validate(args: MultiLatentRaggedPageAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("queries_nope", "T H R"), ("queries_pe", "T H Dr")):
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, axes[2:])
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_same_dtype({"queries_nope": args.queries_nope, "queries_pe": args.queries_pe})
    check_shape("keys_values", args.keys_values, "T R", sizes)
    check_shape("keys_pe", args.keys_pe, "T Dr", sizes)
    rows = "P S/pack pack lanes"
    check_shape("kv_cache", args.kv_cache, rows, sizes)
    check_not_empty("kv_cache", args.kv_cache, rows, "S/pack")
    if args.kv_cache.dtype != jnp.int8:
        check_dtype("kv_cache", args.kv_cache, jnp.floating, "a floating dtype or int8")
    check_same_dtype({"kv_cache": args.kv_cache, "keys_values": args.keys_values, "keys_pe": args.keys_pe})
    tail = (values_per_32_bits(args.kv_cache.dtype), sum(latent_and_rotary_lanes(args)))
    if args.kv_cache.shape[2:] != tail:
        raise ValueError(
            f"kv_cache: got shape {tuple(args.kv_cache.shape)}, wants [P, S / {tail[0]}, {tail[0]}, {tail[1]}] "
            f"for {args.kv_cache.dtype}, R={sizes['R']} and Dr={sizes['Dr']}"
        )
    check_integer_array("kv_lens", args.kv_lens, "N", sizes)
    check_not_empty("kv_lens", args.kv_lens, "N", "N")
    check_page_tables("block_tables", args.block_tables, sizes)
    check_integer_array("query_start_loc", args.query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    check_integer_array("distribution", args.distribution, "3", {"3": 3})
    check_score_arguments(args, sizes)


def latent_and_rotary_lanes(args: MultiLatentRaggedPageAttentionArguments) -> tuple[int, int]:
    """Lanes of the latent vector and of the rotary part in a row of the cache."""
    latent, rotary = args.queries_nope.shape[-1], args.queries_pe.shape[-1]
    return cdiv(latent, LANES) * LANES, cdiv(rotary, LANES) * LANES


def conditions(args: MultiLatentRaggedPageAttentionArguments) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts, tables and the numbers of sequences fit each other."""
    if not have_ranks(args, queries_nope=3, kv_cache=4):
        return
    yield from packed_sequence_conditions(
        args, args.queries_nope.shape[0], args.kv_cache.shape[1] * args.kv_cache.shape[2], "distribution"
    )


def lower(args: MultiLatentRaggedPageAttentionArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    pages, *_, lanes = args.kv_cache.shape
    slots, sequences = args.kv_cache.shape[1] * args.kv_cache.shape[2], args.kv_lens.shape[0]
    query = jnp.concatenate((args.queries_nope, args.queries_pe), axis=-1)
    return PagedAttention(
        query=rounded_as_cache(query, args.q_scale, args.kv_cache.dtype),
        key_pages=args.kv_cache.reshape(pages, slots, lanes),
        value_pages=None,
        block_tables=args.block_tables.reshape(sequences, args.block_tables.size // sequences),
        kv_lens=args.kv_lens,
        query_start=args.query_start_loc,
        kv_layout=paged_cache.LATENT_LAYOUT,
        kv_heads=None,
        num_seqs=args.distribution[2],
        new_keys=jnp.concatenate((args.keys_values, args.keys_pe), axis=-1)[:, None],
        latent=(args.queries_nope.shape[-1], latent_and_rotary_lanes(args)[0]),
        **score_fields(args, query, query.shape[-1]),
    )


def finish(args: MultiLatentRaggedPageAttentionArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output, and the cache in its own shape."""
    return with_lse(args, output[0], output[1], output[2].reshape(args.kv_cache.shape))


def reference(args: MultiLatentRaggedPageAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    return finish(args, paged_attention.reference(lower(args))[0])


AXES_BY_ARGUMENT = {
    "queries_nope": "t h v",
    "queries_pe": "t h c",
    "keys_values": "t v",
    "keys_pe": "t c",
    "kv_cache": "p s k d",
    "kv_lens": "r",
    "block_tables": "x",
    "query_start_loc": "n",
    "distribution": "y",
}


class MultiLatentRaggedPageAttention(Kernel[MultiLatentRaggedPageAttentionConfig, tuple[Array, Array]]):
    """Wraps `multi_latent_ragged_page_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=MultiLatentRaggedPageAttentionArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    reference=reference,
    cases=cases.cases(MultiLatentRaggedPageAttentionArguments),
    make_inputs=cases.make_inputs,
    axes=AXES_BY_ARGUMENT,
    finish=finish,
    axes_of=table_axes,
    output=("t h v", "p s k d"),
    lse="t h",
)
MultiLatentRaggedPageAttention.op = OP
