"""Converts queries to the kernel's layout, and its results back to the callers'."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention, qq_bias_of_pairs, round_to_compute_dtype
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.tpu.mosaic.code_rows import CodeFormat
from ejkernel_pallas.tpu.mosaic.paged_functions import BY_QUERY, kind_of_row
from ejkernel_pallas.tpu.mosaic.paged_layout import caches_as_stored
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES
from ejkernel_pallas.tpu.paged_attention.kernels.pair_bias import bias_tokens_per_copy
from ejkernel_pallas.tpu.paged_attention.kernels.pair_functions import rows_per_head_period
from ejkernel_pallas.tpu.paged_attention.plan import WorkList
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec


def pack_queries(record: PagedAttention, spec: PagedSpec, work: WorkList) -> jax.Array:
    """Returns the queries as [Hk, rows, D]: a token's query heads of one KV head are adjacent, and every sequence
    begins at a row where a copy may begin.
    """
    query = round_to_compute_dtype(record.query, record).at[work.token_at_index].get(mode="fill", fill_value=0)
    if spec.cache_layout.codes is not None:
        query = _queries_of_codes(query, spec.cache_layout.codes)
    if record.latent is not None:  # the rotary part is moved to where cache rows have it
        size, start = record.latent
        query = jnp.concatenate(
            (jnp.pad(query[..., :size], ((0, 0), (0, 0), (0, start - size))), query[..., size:]), axis=-1
        )
    query = jnp.pad(query, ((0, 0), (0, spec.heads - query.shape[1]), (0, spec.head_dim - query.shape[2])))
    query = query.astype(spec.operand_dtype).reshape(-1, spec.kv_heads, spec.group_size, spec.head_dim).swapaxes(0, 1)
    return query.reshape(spec.kv_heads, -1, spec.head_dim)


def _queries_of_codes(query: jax.Array, codes: CodeFormat) -> jax.Array:
    """Returns queries [..., D + Q] in the order of unpacked codes, with those of signs from a whole lane group on."""
    size = codes.keys.count
    columns = codes.keys.as_rows(query[..., :size])
    if codes.signs is None:
        return columns
    padding = jnp.zeros((*query.shape[:-1], codes.sign_column - size), query.dtype)
    return jnp.concatenate((columns, padding, codes.signs.as_rows(query[..., size:])), axis=-1)


def code_table(codebook: jax.Array) -> jax.Array:
    """Returns a codebook as float32 [16, 128], the same in every lane; its last entry follows it."""
    entries = jnp.pad(codebook.astype(jnp.float32), (0, 2 * SUBLANES - codebook.shape[0]), mode="edge")
    return jnp.broadcast_to(entries[:, None], (2 * SUBLANES, LANES))


def pack_pair_bias(record: PagedAttention, spec: PagedSpec, work: WorkList) -> jax.Array:
    """Returns the bias for pairs of each token of the packed queries, float32 [tokens, 1, columns], in the unit of
    scores.

    An axis of size 1 after the tokens lets a copy begin at any token. Columns of zeros on both sides let a copy have
    the columns of a whole block of keys.
    """
    sequence, position = paged_cache.token_sequences_and_positions(record)
    query_lengths = paged_cache.query_ranges(record)[1]
    owner = jnp.maximum(sequence, 0)
    row = jnp.where(sequence < 0, -1, position - (record.kv_lens.astype(jnp.int32) - query_lengths)[owner])
    bias = _pair_bias_rows(record, spec, query_lengths, owner, row).astype(jnp.float32)
    # A finite bias stays finite, since one of -inf masks.
    limit = jnp.finfo(jnp.float32).max
    scaled = jnp.clip(bias * score_unit(spec), -limit, limit)
    bias = jnp.where(jnp.isfinite(bias), scaled, bias).at[work.token_at_index].get(mode="fill", fill_value=0)
    columns = cdiv(spec.pair_bias_columns, LANES) * LANES
    after = spec.block_kv + LANES + columns - spec.pair_bias_columns
    bias = jnp.pad(bias, ((0, bias_tokens_per_copy(spec)), (spec.block_kv, after)))
    return bias[:, None]


def _pair_bias_rows(
    record: PagedAttention, spec: PagedSpec, query_lengths: jax.Array, sequence: jax.Array, row: jax.Array
) -> jax.Array:
    """Returns the rows of the bias [T, columns] of tokens, given the sequence and the row of each; 0 for row -1."""
    bias, size = record.qq_bias, spec.pair_bias_columns
    assert bias is not None  # the spec has columns
    if bias.ndim == 1:
        columns = qq_bias_of_pairs(
            record, query_lengths, sequence[:, None], row[:, None], jnp.arange(size, dtype=jnp.int32)
        )
        assert columns is not None  # the record has a bias
        return columns
    # Whole rows are gathered at once, which is faster than elements. Negative indices would count from the end.
    row = jnp.where(row < 0, bias.shape[-2], row)
    at = row if bias.ndim == 2 else (sequence, row)
    return bias[..., :size].at[at].get(mode="fill", fill_value=0)


def has_score_mod(spec: PagedSpec) -> bool:
    """Returns whether there is a `score_mod`, which takes scores and returns them in their own unit."""
    return spec.functions is not None and spec.functions.score_mod is not None


def softmax_unit(spec: PagedSpec) -> float:
    """Returns the factor on scores in the softmax: they are powers of two unless a `score_mod` returns them.

    Scaling its results too would take operations for each pair, and could turn a finite score into -inf, which masks.
    Instead, differences from the maximum are scaled.
    """
    return 1.0 if has_score_mod(spec) else LOG2E


def score_unit(spec: PagedSpec) -> float:
    """Returns the factor on what is added to scores, which may be arguments of the soft cap."""
    return softmax_unit(spec) if spec.soft_cap is None else 1 / spec.soft_cap


def pack_row_terms(row_positions: jax.Array, spec: PagedSpec, work: WorkList) -> dict[str, jax.Array]:
    """Returns what each row of the packed queries has for itself, [rows, 128], of positions and contexts [T, 2]."""
    packed = row_positions.at[work.token_at_index].get(mode="fill", fill_value=-1)
    rows = jnp.repeat(packed, spec.group_size, axis=0)
    position, context = (jnp.broadcast_to(rows[:, n, None], (rows.shape[0], LANES)) for n in (0, 1))
    terms: dict[str, jax.Array] = {}
    if spec.has_row_positions:
        terms["row_positions"] = position
    if spec.has_row_contexts:
        terms["row_contexts"] = context.astype(jnp.float32)
    return terms


def unpack_outputs(record: PagedAttention, spec: PagedSpec, work: WorkList, output: jax.Array) -> jax.Array:
    """Converts [Hk, rows, Dv] to [T, H, Dv]."""
    heads, size = record.query.shape[1], paged_cache.value_head_dim(record)
    first = 0 if record.latent else spec.value_dim - size
    tokens = output[:, :, first : first + size].reshape(spec.kv_heads, -1, spec.group_size, size)
    # Tokens are taken before heads are put next to each other: in the other order XLA takes three times as long to
    # compile.
    places = jnp.where(work.is_in_sequence, work.packed_index, tokens.shape[1])
    tokens = jnp.take(tokens, places, axis=1, mode="fill", fill_value=0)
    tokens = tokens.swapaxes(0, 1).reshape(-1, spec.heads, size)[:, :heads]
    codes = spec.cache_layout.codes
    return tokens if codes is None else codes.values.as_coordinates(tokens)


def unpack_lse(record: PagedAttention, spec: PagedSpec, work: WorkList, lse: jax.Array) -> jax.Array:
    """Converts [items, Hk, 1, rows of a tile] to [T, H]."""
    tiles = lse[:, :, 0, : spec.tokens_per_tile * spec.group_size].reshape(
        -1, spec.kv_heads, spec.tokens_per_tile, spec.group_size
    )
    tokens = tiles.swapaxes(1, 2).reshape(-1, spec.tokens_per_tile, spec.heads)[work.item_of_token, work.offset_in_item]
    return jnp.where(work.is_in_sequence[:, None], tokens[:, : record.query.shape[1]], -jnp.inf)


def head_values_by_row(values: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns the value of each row's query head, of values [H]: float32 [Hk, rows of a tile, 128]."""
    padded = jnp.pad(values.astype(jnp.float32), (0, spec.heads - values.shape[0]))
    rows = jnp.tile(padded.reshape(spec.kv_heads, spec.group_size), (1, cdiv(spec.rows_per_tile, spec.group_size)))[
        :, : spec.rows_per_tile
    ]
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def pack_values_by_query(values: jax.Array, spec: PagedSpec, work: WorkList) -> jax.Array:
    """Returns values of functions [T, H, n] as planes of packed query rows, each in every lane, [planes, rows, 128]."""
    assert spec.functions is not None  # it has the values
    values = values.at[work.token_at_index].get(mode="fill", fill_value=0)
    values = jnp.pad(values, ((0, 0), (0, spec.heads - values.shape[1]), (0, 0)))
    planes = values.reshape(-1, spec.kv_heads, spec.group_size, values.shape[2]).transpose(3, 1, 0, 2)
    planes = planes.reshape(values.shape[2], spec.kv_heads, -1)
    rows = [row for _, row in spec.functions.rows() if kind_of_row(row) == BY_QUERY]
    planes = [x if "h" in row.reads else x[:1] for x, row in zip(planes, rows, strict=True)]
    planes = jnp.concatenate(planes)
    return jnp.broadcast_to(planes[..., None], (*planes.shape, LANES))


def pack_values_by_head(values: jax.Array, spec: PagedSpec) -> jax.Array:
    """Returns values of functions [1, H, n] for two periods of rows, [Hk, 2 period, 128 n], each in 128 lanes."""
    values = jnp.pad(values[0], ((0, spec.heads - values.shape[1]), (0, 0)))
    values = jnp.repeat(values, LANES, axis=1).reshape(spec.kv_heads, spec.group_size, -1)
    return jnp.tile(values, (1, 2 * rows_per_head_period(spec) // spec.group_size, 1))


def pack_new_tokens(record: PagedAttention) -> tuple[jax.Array, ...]:
    """Returns new tokens in the layout of the caches' slots, one array per cache; heads and lanes that are padding
    are 0.
    """
    keys, values = record.new_keys, record.new_values
    if keys is None or values is None:
        return ()
    if record.kv_layout != paged_cache.COMBINED_LAYOUT:
        assert record.value_pages is not None  # the layout has separate values
        return keys.astype(record.key_pages.dtype), values.astype(record.value_pages.dtype)
    pages = record.key_pages
    rows = jnp.stack((keys, values), axis=2).astype(pages.dtype)
    padding = [(0, wants - has) for has, wants in zip(rows.shape[1:], pages.shape[2:], strict=True)]
    rows = jnp.pad(rows, ((0, 0), *padding))
    return (rows.reshape(-1, *caches_as_stored(record)[0].shape[2:]),)
