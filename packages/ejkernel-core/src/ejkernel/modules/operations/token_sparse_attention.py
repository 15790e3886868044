"""Token-sparse attention: every query attends to the keys that it lists."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8

from ejkernel.families import token_sparse_attention as family
from ejkernel.modules.operations.cases import token_sparse_attention as cases
from ejkernel.modules.operations.configs import TokenSparseAttentionConfig
from ejkernel.modules.operations.shared.conditions import have_ranks
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.listed_keys import (
    check_request_pages,
    checked_indices,
    request_length_conditions,
    slots_of_listed_tokens,
)
from ejkernel.modules.operations.shared.lse import WithLse, split_output_and_lse, with_lse
from ejkernel.modules.operations.shared.paged_arguments import as_choice
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.modules.operations.shared.sinks import check_sinks, sink_logits
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition
from ejkernel.planning.fp8_latents import CHANNELS_PER_SCALE, row_bytes


@document_options
def token_sparse_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"] | Float[Array, "p s g d"] | UInt8[Array, "b s g bytes"],
    value: Float[Array, "b s g v"] | Float[Array, "p s g v"] | None,
    indices: Integer[Array, "b t k"] | Integer[Array, "b t #g k"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    block_tables: Integer[Array, "b n"] | None = None,
    kv_lens: Integer[Array, " b"] | None = None,
    *,
    value_size: int | None = None,
    key_format: str | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: TokenSparseAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | WithLse:
    """Computes softmax attention of each query to the keys that it lists, in memory linear in T (DeepSeek-V3.2).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size, K listed keys.
    Query head h reads KV head `h // (H // Hk)`. T and S are independent. The formulas are in
    `ejkernel.families.token_sparse_attention`.

    The indices alone decide what a query reads: causality, windows and packed sequences are those of the indices, as
    `lightning_indexer` returns them. An index outside of 0..S-1 is an empty entry. An index that is listed n times
    counts n times, as in FlashMLA.

    Two forms of keys and values:

    - value given: attention with Hk KV heads (GQA, MQA, MHA);
    - value None: the *latent* form of absorbed MLA. The first `value_size` entries of each key are its value, which is
      FlashMLA's `flash_mla_sparse_fwd` with 576 and 512.

    With `block_tables`, keys and values are a cache of pages, to decode: row b of the queries has the newest tokens of
    request b, and indices count the tokens of that request. Nothing is copied but the keys that are listed.

    Over devices, batch, heads and the query's tokens can be split; over pages, heads alone.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk. With `block_tables` [P, S, Hk, D], pages of S slots.
            With `key_format` the last axis has the bytes of a row, uint8 or float8_e4m3fn.
        value: [B, S, Hk, V], dtype of query, or [P, S, Hk, V]; None takes `value_size` entries of key.
        indices: [B, T, K] int, for all heads, or [B, T, Hk|1, K], for the query heads of each KV head. In any order.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        block_tables: [B, N] int, the pages of each request, S tokens each. The tokens of an entry that is no page, such
            as -1, are empty entries of indices.
        kv_lens: [B] int, tokens of each request; an index from there on is an empty entry. Only with block_tables.
        value_size: V, from 1 to D; only with value None.
        key_format: "fp8_latents" where a key is a row of FlashMLA's 8-bit cache, 656 bytes for 512 + 64:
            `ejkernel.quantization.pack_fp8_latents` makes them. `value_size` is then a multiple of 128, and keys have
            no gradient. None where keys are numbers.
        softmax_scale: Factor on the scores; None means `D ** -0.5`. Required with value None, where D is the size of an
            absorbed key, and a model's scale is that of its keys before absorption: `(128 + 64) ** -0.5` in DeepSeek's
            models, times a factor for YaRN.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, T, H, V] in query's dtype. A query without a valid index gives 0 and has gradient 0.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf where
        a query has no valid index and no sink. Differentiable. Gradients of key and value are added in the order of the
        queries, so two runs give the same bits.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import lightning_indexer, token_sparse_attention

        keys = jax.random.split(jax.random.key(0), 5)
        indices, _ = lightning_indexer(
            jax.random.normal(keys[0], (1, 64, 4, 32)),
            jax.random.normal(keys[1], (1, 64, 32)),
            jax.random.normal(keys[2], (1, 64, 4)),
            top_k=16,
        )
        query = jax.random.normal(keys[3], (1, 64, 8, 48))
        latent = jax.random.normal(keys[4], (1, 64, 1, 48))  # [latent vector | rotary key]
        output = token_sparse_attention(query, latent, None, indices, value_size=32, softmax_scale=32**-0.5)
        assert output.shape == (1, 64, 8, 32)
        ```
    """
    return run_operation(OP, locals())


class TokenSparseAttentionArguments(ArgumentRecord, of=token_sparse_attention):
    """The arguments of a call of `token_sparse_attention`."""

    def __post_init__(self) -> None:
        as_choice("key_format", self.key_format, (None, family.FP8_LATENTS))
        scale, size = self.softmax_scale, self.value_size
        set_canonical_values(
            self,
            value_size=None if size is None else as_count("value_size", size, minimum=1),
            softmax_scale=None if scale is None else as_number("softmax_scale", scale),
            return_lse=as_flag("return_lse", self.return_lse),
        )


def validate(args: TokenSparseAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    rows, row_size = ("B" if args.block_tables is None else "P"), ("D" if args.key_format is None else "bytes")
    arrays = {"query": args.query, "key": args.key} | ({} if args.value is None else {"value": args.value})
    for name, axes in (("query", "B T H D"), ("key", f"{rows} S Hk {row_size}"), ("value", f"{rows} S Hk V")):
        if name in arrays:
            check_shape(name, arrays[name], axes, sizes)
            check_not_empty(name, arrays[name], axes, " ".join(axes.split()[2:]))
    check_dtype("query", args.query, jnp.floating, "a floating dtype")
    if args.key_format is None:
        check_same_dtype(arrays)
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"key: got shape {tuple(args.key.shape)} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )
    _check_value_size(args, sizes["D"])
    _check_key_format(args, sizes)
    if getattr(args.indices, "ndim", 0) == 4:
        check_shape("indices", args.indices, "B T Hk K", sizes, broadcast="Hk")
    else:
        check_shape("indices", args.indices, "B T K", sizes)
    check_dtype("indices", args.indices, jnp.integer, "an integer dtype")
    check_sinks(args.softmax_aux, sizes["H"])
    check_request_pages(args.block_tables, args.kv_lens, args.key, sizes)


def _check_key_format(args: TokenSparseAttentionArguments, sizes: dict[str, int]) -> None:
    """Raises ValueError unless keys in a format of bytes are latent vectors of that format."""
    if args.key_format is None:
        return
    if args.value is not None:
        raise ValueError(f"value: got shape {tuple(args.value.shape)}, wants None with key_format={args.key_format!r}")
    if args.value_size % CHANNELS_PER_SCALE:
        raise ValueError(
            f"value_size: got {args.value_size}, wants a multiple of {CHANNELS_PER_SCALE} with "
            f"key_format={args.key_format!r}"
        )
    wants = row_bytes(args.value_size, sizes["D"] - args.value_size)
    if sizes["bytes"] != wants or args.key.dtype not in (jnp.uint8, jnp.float8_e4m3fn):
        raise ValueError(
            f"key: got {args.key.dtype}{list(args.key.shape)}, wants {wants} bytes per row, uint8 or float8_e4m3fn, "
            f"for {args.value_size} + {sizes['D'] - args.value_size} channels"
        )


def _check_value_size(args: TokenSparseAttentionArguments, size: int) -> None:
    """Raises ValueError unless a call has either a value or the size of a value within the key."""
    if args.value is not None:
        if args.value_size is not None:
            raise ValueError(f"value_size: got {args.value_size} with an array as value, wants only one of them")
    elif args.value_size is None:
        raise ValueError("value_size: got None with value None, wants how many leading entries of key are its value")
    elif args.value_size > size:
        raise ValueError(f"value_size: got {args.value_size}, wants at most the {size} entries of key")
    elif args.softmax_scale is None:
        raise ValueError(
            f"softmax_scale: got None with value None, wants a number: the default, {size}**-0.5, is that of absorbed "
            "keys, not of the model's heads"
        )


def conditions(args: TokenSparseAttentionArguments) -> Iterable[Condition]:
    """Yields the condition that the lengths of requests fit their pages."""
    if args.block_tables is not None and have_ranks(args, key=4, block_tables=2):
        yield from request_length_conditions(args.kv_lens, args.block_tables.shape[1] * args.key.shape[1])


def _as_one_row(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] -> [1, B * T, ...]."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def lower(args: TokenSparseAttentionArguments) -> family.TokenSparseAttention:
    """Returns the record of a call. The queries over pages are one row, whose keys are the slots of all pages."""
    query, key, value, indices = args.query, args.key, args.value, args.indices
    indices = indices if indices.ndim == 4 else indices[:, :, None]
    if args.block_tables is None:
        indices = checked_indices(indices, key.shape[1])
    else:
        indices = slots_of_listed_tokens(indices, args.block_tables, args.kv_lens, key.shape[:2])
        query, key, value, indices = jax.tree.map(_as_one_row, (query, key, value, indices))
    if args.key_format is not None:
        key = lax.bitcast_convert_type(key, jnp.uint8)
    value_size: Any = args.value_size if value is None else value.shape[3]
    return family.TokenSparseAttention(
        query=query,
        key=key,
        indices=indices,
        softmax_scale=query.shape[3] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        value_size=value_size,
        value=value,
        softmax_aux=sink_logits(args.softmax_aux, query.shape[2], query.dtype),
        key_format=args.key_format,
    )


def finish(args: TokenSparseAttentionArguments, result: Any) -> Any:
    """Returns the output and the lse of each request, from those of the row of all requests."""
    if args.block_tables is None:
        return result
    output, lse = split_output_and_lse(args, result)
    requests, tokens, heads, _ = args.query.shape
    output = output.reshape(requests, tokens, heads, output.shape[-1])
    return with_lse(args, output, None if lse is None else lse.reshape(heads, requests, tokens).swapaxes(0, 1))


def reference(args: TokenSparseAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    output, residuals = family.reference(lower(args))
    return finish(args, with_lse(args, output, residuals.lse))


def _axes_of(args: TokenSparseAttentionArguments) -> dict[str, Any]:
    """Returns the axis letters of indices, where they differ by KV head, and those of pages and their requests."""
    listed = "t g k" if args.indices.ndim == 4 else "t k"
    if args.block_tables is None:
        return {"indices": f"b {listed}"}
    # The row of all requests is split by heads alone: its letters of requests and tokens are not those of a record.
    return {
        "query": "r u h d",
        "key": "p s g d",
        "value": "p s g v",
        "indices": f"r {listed.replace('t', 'u')}",
        "output": "r u h v",
    }


class TokenSparseAttention(Kernel[TokenSparseAttentionConfig, Array]):
    """Wraps `token_sparse_attention` in an object that an `Executor` can call."""


OP = Op(
    arguments=TokenSparseAttentionArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    reference=reference,
    cases=cases.cases(TokenSparseAttentionArguments),
    make_inputs=cases.make_inputs,
    lse="b h t",
    conditions=conditions,
    finish=finish,
    axes={"indices": "b t k", "softmax_aux": "h n", "block_tables": "r n", "kv_lens": "r"},
    axes_of=_axes_of,
)
TokenSparseAttention.op = OP
