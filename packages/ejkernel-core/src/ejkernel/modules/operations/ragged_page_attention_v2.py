"""Prefill and decoding mixed in one batch, over pages that hold keys and values together and are only read."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.modules.operations.cases import paged as paged_cases
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.configs import RaggedPageAttentionv2Config
from ejkernel.modules.operations.shared import conventions
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    check_packed_sequences,
    check_query,
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
    as_float_dtype,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.renamed import accept_older_names
from ejkernel.types.pair_functions import PairFunction


@accept_older_names(context_lens="kv_lens")
@document_options
def ragged_page_attention_v2(
    queries: Float[Array, "t h d"],
    kv_pages: Float[Array, "p s 2*g d"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"],
    query_start_loc: Integer[Array, " n"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    compute_dtype: Any = None,
    optimized: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    mask_value: float | None = None,
    vmem_limit_bytes: int | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    qq_bias: Float[Array, "i i"] | Float[Array, "r i i"] | Float[Array, " pairs"] | None = None,
    shared_prefix: int | Integer[Array, ""] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_size: int | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv2Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "t h d"] | WithLse:
    """Computes causal attention of the newest tokens of many sequences over their cached keys (Kwon et al. 2023).

    Shape letters: T query rows, N sequences, P pages of S slots, H query heads, Hk KV heads, D head size. Sequence n
    has rows `query_start_loc[n] : query_start_loc[n + 1]`, its newest tokens, which the cache holds already: row i of
    q is at position `kv_lens[n] - q + i`. The token at position k lies in page `block_tables[n, k // S]`, slot
    `k % S`. The formula is in `ejkernel.families.paged_attention`. Not differentiable.

    Over devices, heads can be split: those of `queries` and the `2 * Hk` rows of `kv_pages` alike.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        kv_pages: [P, S, 2 * Hk, D] floating; row 2j is the key of KV head j, row 2j + 1 its value.
        kv_lens: [N] int, tokens of each sequence, its queries included. `context_lens` is its old name.
        block_tables: [N, pages per sequence] int. Entries past a sequence's length are ignored; within it, an entry
            that is no page of the cache is a page without keys.
        query_start_loc: [N + 1] int, not decreasing up to `num_seqs`. Sequences may have no queries.
        num_seqs: How many of the N sequences are live; int, or int array of shape () or [1]. Rows of the others are 0.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        compute_dtype: Floating dtype that queries, keys and values are rounded to before the products; None for their
            own. Sums are float32 in any case.
        optimized: For callers of earlier versions, which had two kernels; here there is one.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        mask_value: Score of masked keys, at most -10000; they weigh nothing, whatever it is.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use (tuning).
        alibi_slopes: [H] slopes m of the term `m * (k - c)`, c the sequence's tokens before its queries.
        qq_bias: [Q, Q] floating, added for query row i and the key of query row j of the same sequence; none beyond Q.
            -inf masks. [N, Q, Q] has a table for each sequence, such as the tree of each request. [L] has
            these packed: the q * q entries of each sequence with q rows, one sequence after the other.
        shared_prefix: How many tokens all sequences begin with, such as those of a system prompt; int, or int array of
            shape (). They lie in the pages of the first sequence, whatever the other tables say there, and no query is
            among them.
        k_scale: Factor on the scores, by which keys were divided before they were stored, in a cache of 8 bits.
        v_scale: Factor on the output, by which values were divided.
        chunk_size: Queries attend only to keys in the same run of `chunk_size` positions, counted from 0 (Llama 4).
        score_mod: `(score, n, h, q_pos, k_pos) -> score`, a function of scalars that replaces each score after the soft
            cap: n is the sequence, h the query head, q_pos and k_pos are positions in the sequence, not in pages.
        mask_mod: `(n, h, q_pos, k_pos) -> bool`, True where a pair attends; applies together with everything else. Both
            functions may close over arrays.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, D] in queries' dtype; rows that belong to no sequence are 0.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_page_attention_v2

        queries = jax.random.normal(jax.random.key(0), (8, 4, 64))
        kv_pages = jax.random.normal(jax.random.key(1), (16, 16, 2 * 2, 64))
        lengths = jnp.array([20, 33, 0])  # 7 new tokens of 20, 1 of 33, and an unused row
        tables = jnp.array([[3, 5, 0], [1, 2, 9], [0, 0, 0]])
        output = ragged_page_attention_v2(queries, kv_pages, lengths, tables, jnp.array([0, 7, 8, 8]), 2)
        assert output.shape == (8, 4, 64)
        ```
    """
    return run_operation(OP, locals())


class RaggedPageAttentionv2Arguments(ArgumentRecord, of=ragged_page_attention_v2):
    """The arguments of a call of `ragged_page_attention_v2`."""

    def __post_init__(self) -> None:
        dtype = self.compute_dtype
        set_canonical_score_arguments(
            self,
            num_seqs=np.int32(self.num_seqs) if isinstance(self.num_seqs, int) else self.num_seqs,
            compute_dtype=None if dtype is None else as_float_dtype("compute_dtype", dtype),
            **pair_functions(self.score_mod, self.mask_mod, self.queries),
        )


ragged_page_attention = ragged_page_attention_v2


def validate(args: RaggedPageAttentionv2Arguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_query("queries", args.queries, "T H D", sizes)
    check_shape("kv_pages", args.kv_pages, "P S 2Hk D", sizes)
    check_not_empty("kv_pages", args.kv_pages, "P S 2Hk D", "S 2Hk")
    check_dtype("kv_pages", args.kv_pages, jnp.floating, "a floating dtype")
    rows, heads = sizes["2Hk"], sizes["H"]
    if rows % 2 or heads % (rows // 2):
        shape = tuple(args.kv_pages.shape)
        raise ValueError(
            f"kv_pages: got shape {shape}, wants [P, S, 2 * Hk, D] with Hk a divisor of queries' {heads} heads"
        )
    check_packed_sequences("kv_lens", "block_tables", "query_start_loc", args, sizes)
    check_num_seqs("num_seqs", args.num_seqs)
    check_score_arguments(args, sizes)


def check_num_seqs(name: str, value: Any) -> None:
    """Checks a number of sequences.

    Raises:
        ValueError: The value is not an integer scalar.
    """
    wants = "an int, or an int array of shape () or [1]"
    if getattr(value, "shape", None) not in ((), (1,)):
        raise ValueError(f"{name}: got {got(value)}, wants {wants}")
    check_dtype(name, value, jnp.integer, wants)


def conditions(args: RaggedPageAttentionv2Arguments) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts, tables and the number of sequences fit each other."""
    if not have_ranks(args, queries=3, kv_pages=4, block_tables=2):
        return
    yield from packed_sequence_conditions(args, args.queries.shape[0], args.kv_pages.shape[1], "num_seqs")


def lower(args: RaggedPageAttentionv2Arguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    pages, slots, rows, size = args.kv_pages.shape
    return PagedAttention(
        query=args.queries,
        key_pages=args.kv_pages.reshape(pages, slots, rows // 2, 2, size),
        value_pages=None,
        block_tables=args.block_tables,
        kv_lens=args.kv_lens,
        query_start=args.query_start_loc,
        kv_layout=paged_cache.COMBINED_LAYOUT,
        kv_heads=None,
        num_seqs=jnp.reshape(args.num_seqs, ()),
        compute_dtype=args.compute_dtype,
        **score_fields(args, args.queries, size),
    )


def finish(args: RaggedPageAttentionv2Arguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns."""
    return with_lse(args, output[0], output[1])


def configure(
    args: RaggedPageAttentionv2Arguments, cfg: RaggedPageAttentionv2Config | None
) -> RaggedPageAttentionv2Config | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(RaggedPageAttentionv2Config, cfg, vmem_limit_bytes=args.vmem_limit_bytes)


class RaggedPageAttentionv2(Kernel[RaggedPageAttentionv2Config, Array]):
    """Wraps `ragged_page_attention_v2` in an object that an `Executor` can call."""


RaggedPageAttention = RaggedPageAttentionv2

OP = Op(
    arguments=RaggedPageAttentionv2Arguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    conventions=conventions.page_sentences,
    cases=paged_cases.v2_cases(RaggedPageAttentionv2Arguments),
    make_inputs=paged_inputs.make_v2_inputs,
    axes={"kv_pages": "p s g d", "num_seqs": "c", "softmax_aux": "h sinks"},
    finish=finish,
    output="t h v",
    lse="t h",
    configure=configure,
)
RaggedPageAttentionv2.op = OP
