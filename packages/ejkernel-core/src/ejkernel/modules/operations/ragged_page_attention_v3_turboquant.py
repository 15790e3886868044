"""Prefill and decoding mixed in one batch, over pages of TurboQuant's codes that new tokens are first written into."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged_turboquant as cases
from ejkernel.modules.operations.configs import RaggedPageAttentionv3TurboQuantConfig
from ejkernel.modules.operations.shared import conventions, turboquant_caches
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import (
    check_integer_array,
    check_page_tables,
    check_query,
    table_axes,
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.paged_terms import (
    check_score_arguments,
    packed_sequence_conditions,
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.shapes import check_dtype, check_not_empty, check_shape
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition


@document_options
def ragged_page_attention_v3_turboquant(
    queries: Float[Array, "t h d"],
    keys: Float[Array, "t g d"],
    values: Float[Array, "t g d"],
    key_indices_pages: UInt8[Array, "p s g key_bytes"],
    key_signs_pages: UInt8[Array, "p s g sign_bytes"],
    key_norms_pages: Float[Array, "p s g 2"],
    value_indices_pages: UInt8[Array, "p s g value_bytes"],
    value_norms_pages: Float[Array, "p s g"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"] | Integer[Array, " r*k"],
    query_start_loc: Integer[Array, " n"],
    distribution: Integer[Array, " 3"],
    rotation_matrix: Float[Array, "d d"],
    qjl_projection: Float[Array, "projections d"],
    key_codebook: Float[Array, " key_levels"],
    value_codebook: Float[Array, " value_levels"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    bits: int = 4,
    qjl_dim: int | None = None,
    vmem_limit_bytes: int | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv3TurboQuantConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h d"], *tuple[Array, ...]] | WithLse:
    """Writes new tokens as codes of a few bits into their pages, then attends (Zandieh et al. 2025, arXiv:2504.19874).

    A vector is stored as its norm and one code per coordinate, after a rotation that all vectors share; a key also has
    the signs of Q projections of its residual, which is what the codes do not represent. Queries are rotated once, and
    so is the output. The formulas of the format are in `ejkernel.planning.turboquant`, and
    `ejkernel.quantization.turboquant` makes the tables. Not differentiable.

    Only the slots of the new tokens are written. Call under `jax.jit` with `donate_argnums` for the five arrays of
    pages and use the returned ones: the update is then in place. A call outside of jit copies them.

    Shape letters: T query rows, N sequences, P pages of S slots, H query heads, Hk KV heads, D head size, b bits of a
    code, Q projections. Sequences, lengths and tables are those of `ragged_page_attention_v3`.

    Over devices, heads can be split: those of `queries`, `keys`, `values` and of all pages alike.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        keys: [T, Hk, D] floating, new keys.
        values: [T, Hk, D] floating, new values.
        key_indices_pages: [P, S, Hk, D * b / 8] uint8, b-bit codes of the rotated keys; b, of 1 to 4, follows from the
            size.
        key_signs_pages: [P, S, Hk, Q / 8] uint8, a bit for each of Q projections of the keys' residuals.
        key_norms_pages: [P, S, Hk, 2] floating, norms of the keys and of their residuals.
        value_indices_pages: [P, S, Hk, D * b / 8] uint8, codes of the rotated values, whose b may be another.
        value_norms_pages: [P, S, Hk] floating.
        kv_lens: [N] int, tokens of each sequence, the new ones included.
        block_tables: [N, K] or flat [N * K] int. Entries past a sequence's length are not read. Within it, an entry
            that is no page of the cache counts as a page without keys, and new tokens that belong there are dropped.
        query_start_loc: [N + 1] int, not decreasing up to the live sequences. Sequences may have no rows.
        distribution: [3] int (i, j, k): k sequences are live; i and j are advice for kernels. Rows of other sequences
            give 0.
        rotation_matrix: [D, D] floating, orthogonal: `generate_rotation_matrix` of `ejkernel.quantization.turboquant`.
        qjl_projection: [Q, D] floating with entries of N(0, 1), Q a multiple of 8: `generate_projection_matrix`. Q = 0
            leaves the residuals out.
        key_codebook: [at most 2 ** b] floating, what codes of keys stand for: `get_codebook(bits, D).centroids`.
        value_codebook: [at most 2 ** b] floating, the same of values.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        bits: Most bits of a code: a codebook has at most 2 ** bits entries.
        qjl_dim: Q, for a check; None takes it from `qjl_projection`.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use (tuning).
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, D] in queries' dtype, where rows that belong to no sequence are 0, and the five arrays of pages in the
        order of the arguments.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_page_attention_v3_turboquant
        from ejkernel.quantization import turboquant

        rotation = turboquant.generate_rotation_matrix(0, 64)
        projection = turboquant.generate_projection_matrix(1, 64, 64)
        tables = [jnp.asarray(turboquant.get_codebook(bits, 64).centroids) for bits in (3, 4)]
        pages = (16, 16, 2)  # 16 pages of 16 slots, 2 KV heads
        codes = jnp.zeros((*pages, 24), "uint8"), jnp.zeros((*pages, 8), "uint8"), jnp.zeros((*pages, 2))
        cache = (*codes, jnp.zeros((*pages, 32), "uint8"), jnp.zeros(pages))
        queries = jax.random.normal(jax.random.key(2), (8, 4, 64))
        keys, values = jax.random.normal(jax.random.key(3), (2, 8, 2, 64))
        lengths, entries = jnp.array([7, 1]), jnp.array([3, 0, 5, 0])  # a prompt of 7 tokens, and one of 1
        step = jax.jit(ragged_page_attention_v3_turboquant, donate_argnums=(3, 4, 5, 6, 7))
        output, *cache = step(
            queries, keys, values, *cache, lengths, entries, jnp.array([0, 7, 8]), jnp.array([0, 0, 2]), rotation,
            projection, *tables,
        )  # fmt: skip
        assert output.shape == (8, 4, 64)
        ```
    """
    return run_operation(OP, locals())


class RaggedPageAttentionv3TurboQuantArguments(ArgumentRecord, of=ragged_page_attention_v3_turboquant):
    """The arguments of a call of `ragged_page_attention_v3_turboquant`."""

    def __post_init__(self) -> None:
        set_canonical_score_arguments(self, **turboquant_caches.canonical_format_arguments(self))


def validate(args: RaggedPageAttentionv3TurboQuantArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_query("queries", args.queries, "T H D", sizes)
    turboquant_caches.check_turboquant_cache(args, sizes)
    for name in ("keys", "values"):
        check_shape(name, getattr(args, name), "T Hk D", sizes)
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_integer_array("kv_lens", args.kv_lens, "N", sizes)
    check_not_empty("kv_lens", args.kv_lens, "N", "N")
    check_page_tables("block_tables", args.block_tables, sizes)
    check_integer_array("query_start_loc", args.query_start_loc, "N+1", {"N+1": sizes["N"] + 1})
    check_integer_array("distribution", args.distribution, "3", {"3": 3})
    check_score_arguments(args, sizes)


def conditions(args: RaggedPageAttentionv3TurboQuantArguments) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts, tables and the number of sequences fit each other."""
    if not have_ranks(args, queries=3, key_indices_pages=4):
        return
    yield from packed_sequence_conditions(args, args.queries.shape[0], args.key_indices_pages.shape[1], "distribution")


def lower(args: RaggedPageAttentionv3TurboQuantArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    sequences = args.kv_lens.shape[0]
    return turboquant_caches.paged_record(
        args,
        block_tables=args.block_tables.reshape(sequences, args.block_tables.size // sequences),
        num_seqs=args.distribution,
        **turboquant_caches.new_token_fields(args),
    )


def finish(args: RaggedPageAttentionv3TurboQuantArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns: the output, and all pages."""
    pages = turboquant_caches.returned_pages(args, output[2:])
    return with_lse(args, *output[:2], *pages)


def configure(
    args: RaggedPageAttentionv3TurboQuantArguments, cfg: RaggedPageAttentionv3TurboQuantConfig | None
) -> RaggedPageAttentionv3TurboQuantConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(RaggedPageAttentionv3TurboQuantConfig, cfg, vmem_limit_bytes=args.vmem_limit_bytes)


class RaggedPageAttentionv3TurboQuant(Kernel[RaggedPageAttentionv3TurboQuantConfig, tuple[Array, ...]]):
    """Wraps `ragged_page_attention_v3_turboquant` in an object that an `Executor` can call."""


OP = Op(
    arguments=RaggedPageAttentionv3TurboQuantArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    conventions=conventions.page_sentences,
    cases=cases.v3_cases(RaggedPageAttentionv3TurboQuantArguments),
    make_inputs=cases.make_inputs,
    axes={**turboquant_caches.AXES_BY_ARGUMENT, "block_tables": "k", "distribution": "c"},
    finish=finish,
    axes_of=table_axes,
    output=("t h v", *(turboquant_caches.AXES_BY_ARGUMENT[name] for name in turboquant_caches.PAGES)),
    lse="t h",
    configure=configure,
)
RaggedPageAttentionv3TurboQuant.op = OP
