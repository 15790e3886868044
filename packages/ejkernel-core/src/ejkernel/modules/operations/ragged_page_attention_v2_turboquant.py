"""Prefill and decoding mixed in one batch, over pages of TurboQuant's codes that are only read."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt8

from ejkernel.families import paged_attention
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.modules.operations.cases import paged_turboquant as cases
from ejkernel.modules.operations.configs import RaggedPageAttentionv2TurboQuantConfig
from ejkernel.modules.operations.ragged_page_attention_v2 import check_num_seqs
from ejkernel.modules.operations.shared import conventions, turboquant_caches
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
    set_canonical_score_arguments,
)
from ejkernel.modules.operations.shared.shapes import as_float_dtype
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.renamed import accept_older_names


@accept_older_names(context_lens="kv_lens")
@document_options
def ragged_page_attention_v2_turboquant(
    queries: Float[Array, "t h d"],
    key_indices_pages: UInt8[Array, "p s g key_bytes"],
    key_signs_pages: UInt8[Array, "p s g sign_bytes"],
    key_norms_pages: Float[Array, "p s g 2"],
    value_indices_pages: UInt8[Array, "p s g value_bytes"],
    value_norms_pages: Float[Array, "p s g"],
    kv_lens: Integer[Array, " r"],
    block_tables: Integer[Array, "r k"],
    query_start_loc: Integer[Array, " n"],
    num_seqs: int | Integer[Array, ""] | Integer[Array, " 1"],
    rotation_matrix: Float[Array, "d d"],
    qjl_projection: Float[Array, "projections d"],
    key_codebook: Float[Array, " key_levels"],
    value_codebook: Float[Array, " value_levels"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    compute_dtype: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    mask_value: float | None = None,
    bits: int = 4,
    qjl_dim: int | None = None,
    vmem_limit_bytes: int | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RaggedPageAttentionv2TurboQuantConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "t h d"] | WithLse:
    """Computes `ragged_page_attention_v2` over keys and values of a few bits (Zandieh et al. 2025, arXiv:2504.19874).

    A vector is stored as its norm and one code per coordinate, after a rotation that all vectors share; a key also has
    the signs of Q projections of its residual, which is what the codes do not represent. Queries are rotated once, and
    so is the output. The formulas of the format are in `ejkernel.planning.turboquant`.
    `ejkernel.quantization.turboquant` makes the tables and the codes. Not differentiable.

    Shape letters: T query rows, N sequences, P pages of S slots, H query heads, Hk KV heads, D head size, b bits of a
    code, Q projections. Sequences, lengths and tables are those of `ragged_page_attention_v2`.

    Over devices, heads can be split: those of `queries` and of all pages alike.

    Args:
        queries: [T, H, D] float16, bfloat16, float32 or float64, packed.
        key_indices_pages: [P, S, Hk, D * b / 8] uint8, b-bit codes of the rotated keys; b, of 1 to 4, follows from the
            size.
        key_signs_pages: [P, S, Hk, Q / 8] uint8, a bit for each of Q projections of the keys' residuals.
        key_norms_pages: [P, S, Hk, 2] floating, norms of the keys and of their residuals.
        value_indices_pages: [P, S, Hk, D * b / 8] uint8, codes of the rotated values, whose b may be another.
        value_norms_pages: [P, S, Hk] floating.
        kv_lens: [N] int, tokens of each sequence, its queries included. `context_lens` is its old name.
        block_tables: [N, pages per sequence] int. Entries past a sequence's length are ignored; within it, an entry
            that is no page of the cache is a page without keys.
        query_start_loc: [N + 1] int, not decreasing up to `num_seqs`. Sequences may have no queries.
        num_seqs: How many of the N sequences are live; int, or int array of shape () or [1]. Rows of the others are 0.
        rotation_matrix: [D, D] floating, orthogonal: `generate_rotation_matrix` of `ejkernel.quantization.turboquant`.
        qjl_projection: [Q, D] floating with entries of N(0, 1), Q a multiple of 8: `generate_projection_matrix`. Q = 0
            leaves the residuals out.
        key_codebook: [at most 2 ** b] floating, what codes of keys stand for: `get_codebook(bits, D).centroids`.
        value_codebook: [at most 2 ** b] floating, the same of values.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        compute_dtype: Floating dtype that rotated queries, keys and values are rounded to before the products; None for
            that of the queries. Sums are float32 in any case.
        sliding_window: The newest w >= 1 keys, the query's own among them, or (left, right), inclusive.
        mask_value: Score of masked keys, at most -10000; they weigh nothing, whatever it is.
        bits: Most bits of a code: a codebook has at most 2 ** bits entries.
        qjl_dim: Q, for a check; None takes it from `qjl_projection`.
        vmem_limit_bytes: Memory of a TPU core that a kernel may use (tuning).
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [T, H, D] in queries' dtype; rows that belong to no sequence are 0.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import ragged_page_attention_v2_turboquant
        from ejkernel.quantization import turboquant

        cache = jax.random.normal(jax.random.key(0), (2, 16, 16, 2, 64))  # 16 pages of 16 slots, keys and values
        rotation = turboquant.generate_rotation_matrix(1, 64)
        projection = turboquant.generate_projection_matrix(2, 64, 64)
        key_codebook, value_codebook = (turboquant.get_codebook(bits, 64).centroids for bits in (3, 4))
        keys = turboquant.turboquant_compress_keys(cache[0], rotation, key_codebook, projection, bits=3)
        values = turboquant.turboquant_compress_values(cache[1], rotation, value_codebook)
        lengths, tables = jnp.array([20, 33]), jnp.array([[3, 5, 0], [1, 2, 9]])
        output = ragged_page_attention_v2_turboquant(
            jax.random.normal(jax.random.key(3), (8, 4, 64)), *keys, *values, lengths, tables, jnp.array([0, 7, 8]), 2,
            rotation, projection, jnp.asarray(key_codebook), jnp.asarray(value_codebook),
        )  # fmt: skip
        assert output.shape == (8, 4, 64)
        ```
    """
    return run_operation(OP, locals())


class RaggedPageAttentionv2TurboQuantArguments(ArgumentRecord, of=ragged_page_attention_v2_turboquant):
    """The arguments of a call of `ragged_page_attention_v2_turboquant`."""

    def __post_init__(self) -> None:
        dtype = self.compute_dtype
        set_canonical_score_arguments(
            self,
            num_seqs=np.int32(self.num_seqs) if isinstance(self.num_seqs, int) else self.num_seqs,
            compute_dtype=None if dtype is None else as_float_dtype("compute_dtype", dtype),
            **turboquant_caches.canonical_format_arguments(self),
        )


def validate(args: RaggedPageAttentionv2TurboQuantArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    check_query("queries", args.queries, "T H D", sizes)
    turboquant_caches.check_turboquant_cache(args, sizes)
    check_packed_sequences("kv_lens", "block_tables", "query_start_loc", args, sizes)
    check_num_seqs("num_seqs", args.num_seqs)
    check_score_arguments(args, sizes)


def conditions(args: RaggedPageAttentionv2TurboQuantArguments) -> Iterable[Condition]:
    """Yields the conditions that lengths, starts, tables and the number of sequences fit each other."""
    if not have_ranks(args, queries=3, key_indices_pages=4, block_tables=2):
        return
    yield from packed_sequence_conditions(args, args.queries.shape[0], args.key_indices_pages.shape[1], "num_seqs")


def lower(args: RaggedPageAttentionv2TurboQuantArguments) -> PagedAttention:
    """Returns the paged-attention record of a call."""
    return turboquant_caches.paged_record(
        args,
        block_tables=args.block_tables,
        num_seqs=jnp.reshape(args.num_seqs, ()),
        compute_dtype=args.compute_dtype,
    )


def finish(args: RaggedPageAttentionv2TurboQuantArguments, output: tuple[jax.Array, ...]) -> Any:
    """Returns what the public function returns."""
    return with_lse(args, *output[:2])


def configure(
    args: RaggedPageAttentionv2TurboQuantArguments, cfg: RaggedPageAttentionv2TurboQuantConfig | None
) -> RaggedPageAttentionv2TurboQuantConfig | None:
    """Returns the call's own configuration, tuning arguments included."""
    return with_tuning_arguments(RaggedPageAttentionv2TurboQuantConfig, cfg, vmem_limit_bytes=args.vmem_limit_bytes)


class RaggedPageAttentionv2TurboQuant(Kernel[RaggedPageAttentionv2TurboQuantConfig, Array]):
    """Wraps `ragged_page_attention_v2_turboquant` in an object that an `Executor` can call."""


OP = Op(
    arguments=RaggedPageAttentionv2TurboQuantArguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    conventions=conventions.page_sentences,
    cases=cases.v2_cases(RaggedPageAttentionv2TurboQuantArguments),
    make_inputs=cases.make_inputs,
    axes={**turboquant_caches.AXES_BY_ARGUMENT, "num_seqs": "c"},
    finish=finish,
    output="t h v",
    lse="t h",
    configure=configure,
)
RaggedPageAttentionv2TurboQuant.op = OP
