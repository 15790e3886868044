"""`multi_latent_ragged_page_attention` with a configuration that can differ by part of the batch."""

from typing import Any

import jax
from jaxtyping import Array, Float, Integer, Num

from ejkernel.families import paged_attention
from ejkernel.modules.operations.cases import paged_latent as cases
from ejkernel.modules.operations.configs import MultiLatentRaggedPageAttentionV2Config
from ejkernel.modules.operations.multi_latent_ragged_page_attention import (
    AXES_BY_ARGUMENT,
    MultiLatentRaggedPageAttentionArguments,
    conditions,
    finish,
    lower,
    reference,
    validate,
)
from ejkernel.modules.operations.multi_latent_ragged_page_attention import OP as FIRST
from ejkernel.modules.operations.shared.lse import WithLse
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def multi_latent_ragged_page_attention_v2(
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
    cfg: MultiLatentRaggedPageAttentionV2Config | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[Float[Array, "t h r"], Num[Array, "p s pack lanes"]] | WithLse:
    """Computes `multi_latent_ragged_page_attention` (DeepSeek-V2, 2024, arXiv:2405.04434) with its own configuration
    class.

    It computes the same from the same arguments, with the same kernels. The configuration can name tiles for each part
    of `distribution` (decoding, uniform prefill, the rest).

    Args:
        queries_nope: [T, H, R] floating, in the latent space.
        queries_pe: [T, H, Dr], dtype of queries_nope.
        keys_values: [T, R] new latent vectors, dtype of kv_cache.
        keys_pe: [T, Dr] new keys with rotary position, dtype of kv_cache.
        kv_cache: [P, S / pack, pack, lanes] floating or int8.
        kv_lens: [N] int.
        block_tables: [N, K] or flat [N * K] int.
        query_start_loc: [N + 1] int.
        distribution: [3] int.
        softmax_scale: Factor on the scores; None means `(R + Dr) ** -0.5`.
        sliding_window: The newest w >= 1 keys, or (left, right), inclusive.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        mask_value: Score of masked keys, at most -10000: they weigh nothing.
        q_scale: Queries are divided by it and rounded to the cache's dtype.
        k_scale: Factor on the scores.
        v_scale: Factor on the output.
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
        [T, H, R] in the queries' dtype, and the cache.
        With `return_lse`, lse [T, H] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import multi_latent_ragged_page_attention_v2

        nope, rope, latent, key = (jnp.ones(shape) for shape in ((2, 4, 64), (2, 4, 16), (2, 64), (2, 16)))
        lengths, tables = jnp.array([2]), jnp.array([3])
        batch = (lengths, tables, jnp.array([0, 2]), jnp.array([0, 0, 1]))
        output, _ = multi_latent_ragged_page_attention_v2(nope, rope, latent, key, jnp.zeros((8, 16, 1, 256)), *batch)
        assert jnp.allclose(output, 1)
        ```
    """
    return run_operation(OP, locals())


class MultiLatentRaggedPageAttentionV2Arguments(
    MultiLatentRaggedPageAttentionArguments, of=multi_latent_ragged_page_attention_v2
):
    """The arguments of a call of `multi_latent_ragged_page_attention_v2`."""


class MultiLatentRaggedPageAttentionV2(Kernel[MultiLatentRaggedPageAttentionV2Config, tuple[Array, Array]]):
    """Wraps `multi_latent_ragged_page_attention_v2` in an object that an `Executor` can call."""


OP = Op(
    arguments=MultiLatentRaggedPageAttentionV2Arguments,
    family=paged_attention.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    reference=reference,
    cases=cases.cases_v2(MultiLatentRaggedPageAttentionV2Arguments),
    make_inputs=cases.make_inputs,
    axes=AXES_BY_ARGUMENT,
    finish=finish,
    axes_of=FIRST.axes_of,
    output=FIRST.output,
    lse=FIRST.lse,
)
MultiLatentRaggedPageAttentionV2.op = OP
