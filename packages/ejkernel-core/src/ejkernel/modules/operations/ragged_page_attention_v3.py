"""Prefill and decoding mixed in one batch, over a cache that the new tokens are first written into."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from ejkernel.arithmetic import cdiv
from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.pages import LANES, values_per_32_bits
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import RaggedPageAttentionv3Config
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    as_choice,
    check_head_groups,
    check_integer_array,
    check_page_tables,
    check_query,
    rounded_as_cache,
    table_axes,
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    packed_sequence_conditions,
    score_fields,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.pair_functions import pair_functions
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
from ejkernel.types.pair_functions import PairFunction

CacheLayout = Literal["interleaved", "lanes"]


@document_options
def ragged_page_attention_v3(
    queries: Float[Array, "t h d"],
    keys: Num[Array, "t g d"],
    values: Num[Array, "t g d"],
    kv_cache: Num[Array, "p s x c lanes"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"] | Integer[Array, " r*k"],
    query_start_loc: Integer[Array, " n"],
    distribution: Integer[Array, " 3"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = 1.0,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    vmem_limit_bytes: int | None = None,
    kv_layout: CacheLayout | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    qq_bias: Float[Array, "i i"] | Float[Array, "r i i"] | Float[Array, " pairs"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    chunk_size: int | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h d"], Num[Array, "p s x c lanes"]] | WithLse:
    """Writes the new tokens of many sequences into their pages, then attends causally (Kwon et al. 2023).

    Shape letters: T rows, N sequences, P pages of S slots, H query heads, Hk KV heads, D head size. Sequence n owns
    rows `query_start_loc[n] : query_start_loc[n + 1]`: row i of q is its token at position `kv_lens[n] - q + i`. The
    token at position k lies in page `block_tables[n, k // S]`, slot `k % S`. The formula is in
    `ejkernel.families.paged_attention`. Not differentiable.

    Only the slots of the new tokens are written. Call under `jax.jit` with `donate_argnums` for the cache and use the
    returned one: the update is then in place. A call outside of jit copies the cache.

    With `pack = 32 // bits(cache dtype)` a cache is [P, S, x, pack, lanes], in one of two layouts. `"interleaved"`:
    x = ceil(2 * Hk / pack) and lanes = D rounded up to 128; axes 2 and 3 together are the rows K0, V0, K1, V1, ...
    `"lanes"`, for D = 64: x = ceil(Hk / pack) and 128 lanes; axes 2 and 3 together are the KV heads, keys in lanes 0 to
    63, values in lanes 64 to 127. What only pads is written as 0.

    Over devices, heads can be split where the cache does not pad them: those of queries, keys, values and the cache's
    axis 2 alike.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        keys: [T, Hk, D] new keys, dtype of kv_cache.
        values: [T, Hk, D] new values, dtype of kv_cache.
        kv_cache: [P, S, x, pack, lanes] floating or int8, as above.
        kv_lens: [N] int, tokens of each sequence, the new ones included.
        block_tables: [N, K] or flat [N * K] int. Entries past a sequence's length are not read. Within it, an entry
            that is no page of the cache counts as a page without keys, and new tokens that belong there are dropped.
        query_start_loc: [N + 1] int, not decreasing up to the live sequences. Sequences may have no rows.
        distribution: [3] int (i, j, k): sequences 0 to i - 1 have one row each, i to j - 1 equally many, up to k - 1
            any number; k sequences are live. The first two are advice for kernels. Rows of other sequences give 0.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`, applied after all scales.
        q_scale: Queries are divided by it and rounded to the cache's dtype, for int8 to the nearest of -128 to 127;
            scores are multiplied by it.
        k_scale: Factor on the scores, by which keys were divided before they were stored.
        v_scale: Factor on the output, by which values were divided.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use (tuning).
        kv_layout: `"interleaved"` or `"lanes"`; None takes the one that the cache's shape allows, and fails where it
            allows both.
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j of the same sequence; none beyond Q.
            -inf masks. [N, Q, Q] has a table for each sequence, such as the tree of each request. [L] has
            these packed: the q * q entries of each sequence with q rows, one sequence after the other.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        score_mod: `(score, n, h, q_pos, k_pos) -> score`, a function of scalars that replaces each score after the soft
            cap: n is the sequence, h the query head, q_pos and k_pos are positions in the sequence, not in pages.
        mask_mod: `(n, h, q_pos, k_pos) -> bool`, True where a pair attends; applies together with everything else. Both
            functions may close over arrays.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, D] in queries' dtype, where rows that belong to no sequence are 0, and the cache.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_page_attention_v3

        queries = jax.random.normal(jax.random.key(0), (8, 4, 128))
        tokens = jax.random.normal(jax.random.key(1), (8, 2, 128))
        cache = jnp.zeros((16, 16, 2 * 2, 1, 128))  # float32: pack is 1
        lengths = jnp.array([7, 1])  # a prompt of 7 tokens, and one of 1
        tables = jnp.array([3, 0, 5, 0])  # 2 pages per sequence, of which one is needed yet
        step = jax.jit(ragged_page_attention_v3, donate_argnums=3)
        starts, distribution = jnp.array([0, 7, 8]), jnp.array([0, 0, 2])
        output, cache = step(queries, tokens, tokens, cache, lengths, tables, starts, distribution)
        assert output.shape == (8, 4, 128)
        ```
    """
    return run_operation(OP, locals())


class RaggedPageAttentionv3Arguments(ArgumentRecord, of=ragged_page_attention_v3):
    """The arguments of a call of `ragged_page_attention_v3`."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(
            self,
            kv_layout=as_choice("kv_layout", self.kv_layout, (None, "interleaved", "lanes")),
            **pair_functions(self.score_mod, self.mask_mod, self.queries),
        )


def validate(args: RaggedPageAttentionv3Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_query("queries", args.queries, "T H D", sizes)
    check_shape("keys", args.keys, "T Hk D", sizes)
    check_not_empty("keys", args.keys, "T Hk D", "Hk")
    check_shape("values", args.values, "T Hk D", sizes)
    check_head_groups("keys", args.keys, "queries", sizes)
    check_shape("kv_cache", args.kv_cache, "P S x pack lanes", sizes)
    check_not_empty("kv_cache", args.kv_cache, "P S x pack lanes", "S")
    if args.kv_cache.dtype != jnp.int8:
        check_dtype("kv_cache", args.kv_cache, jnp.floating, "a floating dtype or int8")
    check_same_dtype({"kv_cache": args.kv_cache, "keys": args.keys, "values": args.values})
    resolve_cache_layout(args)
    check_integer_array("kv_lens", args.kv_lens, "N", sizes)
    check_not_empty("kv_lens", args.kv_lens, "N", "N")
    check_page_tables("block_tables", args.block_tables, sizes)
    check_integer_array("query_start_loc", args.query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    check_integer_array("distribution", args.distribution, "3", {"3": 3})
    check_score_arguments(args, sizes)


def resolve_cache_layout(args: RaggedPageAttentionv3Arguments) -> CacheLayout:
    """Returns the cache's layout.

    Raises:
        ValueError: The cache's shape fits no layout, does not fit `kv_layout`, or fits both layouts and `kv_layout` is
            None.
    """
    (_, kv_heads, size), tail = args.keys.shape, tuple(args.kv_cache.shape[2:])
    pack = values_per_32_bits(args.kv_cache.dtype)
    tails: dict[CacheLayout, tuple[int, ...]] = {
        "interleaved": (cdiv(2 * kv_heads, pack), pack, cdiv(size, LANES) * LANES)
    }
    if 2 * size == LANES:
        tails["lanes"] = (cdiv(kv_heads, pack), pack, LANES)
    layouts: dict[CacheLayout, tuple[int, ...]] = {
        name: shape for name, shape in tails.items() if args.kv_layout in (None, name)
    }
    fitting: list[CacheLayout] = [name for name, shape in layouts.items() if shape == tail]
    if len(fitting) == 1:
        return fitting[0]
    shape = tuple(args.kv_cache.shape)
    if fitting:
        raise ValueError(
            f"kv_cache: got shape {shape}, which fits several layouts; pass kv_layout=, one of {', '.join(fitting)}"
        )
    wants = " or ".join(f"[P, S, {', '.join(map(str, shape))}] ({name})" for name, shape in layouts.items())
    raise ValueError(
        f"kv_cache: got shape {shape}, wants {wants or f'a head size of 64 for kv_layout={args.kv_layout!r}'}"
    )


def conditions(args: RaggedPageAttentionv3Arguments) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts, tables and the numbers of sequences fit each other."""
    if not have_ranks(args, queries=3, kv_cache=5):
        return
    yield from packed_sequence_conditions(args, args.queries.shape[0], args.kv_cache.shape[1], "distribution")


def lower(args: RaggedPageAttentionv3Arguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    (pages, slots, *rows), (_, kv_heads, size), sequences = args.kv_cache.shape, args.keys.shape, args.kv_lens.shape[0]
    lanes = args.kv_cache.shape[4] if resolve_cache_layout(args) == "interleaved" else size
    combined = args.kv_cache.reshape(pages, slots, math.prod(rows) // (2 * lanes), 2, lanes)
    return PagedAttention(
        query=rounded_as_cache(args.queries, args.q_scale, args.kv_cache.dtype),
        key_pages=combined,
        value_pages=None,
        block_tables=args.block_tables.reshape(sequences, args.block_tables.size // sequences),
        kv_lens=args.kv_lens,
        query_start=args.query_start_loc,
        kv_layout=paged_cache.COMBINED_LAYOUT,
        kv_heads=None if combined.shape[2] == kv_heads else kv_heads,
        num_seqs=args.distribution,
        new_keys=args.keys,
        new_values=args.values,
        **score_fields(args, args.queries, size),
    )


def finish(args: RaggedPageAttentionv3Arguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output, and the cache in its own shape."""
    return with_lse(args, output[0], output[1], output[2].reshape(args.kv_cache.shape))


def configure(
    args: RaggedPageAttentionv3Arguments, cfg: RaggedPageAttentionv3Config | None
) -> RaggedPageAttentionv3Config | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(RaggedPageAttentionv3Config, cfg, vmem_limit_bytes=args.vmem_limit_bytes)


class RaggedPageAttentionv3(Kernel[RaggedPageAttentionv3Config, tuple[Array, Array]]):
    """Wraps `ragged_page_attention_v3` in an object that an `Executor` can call."""


OP = Op(
    arguments=RaggedPageAttentionv3Arguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    conventions=conventions.unscaled_page_sentences,
    cases=paged_cases.v3_cases(RaggedPageAttentionv3Arguments),
    make_inputs=paged_inputs.make_v3_inputs,
    axes={"kv_cache": "p s g c d", "block_tables": "k", "distribution": "c", "softmax_aux": "h sinks"},
    finish=finish,
    axes_of=table_axes,
    output=("t h v", "p s g c d"),
    lse="t h",
    configure=configure,
)
RaggedPageAttentionv3.op = OP
