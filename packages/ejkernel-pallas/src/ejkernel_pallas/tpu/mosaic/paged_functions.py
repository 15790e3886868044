"""Which values of `score_mod` and `mask_mod` the paged-attention kernel reads, and from where.

value                   there is one per            the kernel reads it from
---------------------   -------------------------   --------------------------------------------
of h, or a constant     query head                  an array that stays in VMEM, 128 lanes per value
of b or q_idx           query row of a tile, and    an array copied with the queries, a plane of
                        per head if it reads h      rows per value, or per value and KV head
element of an array     key, and per sequence and   an array copied with the pages of a block, a
by k_idx                head if it reads them       line per value, or per value and query head

The kernel computes scalars of a key, such as `k_idx >= starts[b]`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, sequences_and_heads_in_call
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.types.pair_functions import PairFunction
from ejkernel_pallas.tpu.mosaic.split_functions import (
    Row,
    SplitFunction,
    function_refusal_reasons,
    row_values,
    split_function,
)

BY_HEAD, BY_QUERY, BY_KEY = "head", "query", "key"
MAX_GROUP_SIZE_BY_KEY = 16
"""The largest number of query heads per KV head with a value per head and key: each takes a select for all pairs."""
MAX_VALUES_BY_KEY = 2**26
"""The largest number of values per key of a function, all sequences and heads together."""


class RowPlace(NamedTuple):
    """Where the kernel reads a value of a function.

    Attributes:
        kind: `BY_HEAD`, `BY_QUERY` or `BY_KEY`.
        position: Its index among the values of query heads, or its first plane or line.
        reads_head: Whether it has a plane per KV head, or a line per query head.
    """

    kind: str
    position: int
    reads_head: bool


def kind_of_row(row: Row) -> str:
    """Returns the array that has a value of a function."""
    if "k_idx" in row.reads:
        return BY_KEY
    return BY_QUERY if row.reads & {"b", "q_idx"} else BY_HEAD


@dataclasses.dataclass(frozen=True, eq=False)
class PagedFunctions:
    """The functions of a record.

    Attributes:
        score_mod: The two parts of `score_mod`, or None.
        mask_mod: The two parts of `mask_mod`, or None.
    """

    score_mod: SplitFunction | None
    mask_mod: SplitFunction | None

    def has_rows(self, kind: str) -> bool:
        """Returns whether the kernel reads an array of values."""
        return any(kind_of_row(row) == kind for _, row in self.rows())

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yields the values of both functions, each with the name of its function."""
        for name in ("score_mod", "mask_mod"):
            split = getattr(self, name)
            yield from () if split is None else ((name, row) for row in split.rows)

    def places(self, name: str, num_heads: int, kv_heads: int) -> list[RowPlace]:
        """Returns where the values of one of the functions are, in order.

        Args:
            name: `"score_mod"` or `"mask_mod"`.
            num_heads: The number of query heads, including those that are padding.
            kv_heads: The number of KV heads, as the kernel counts them.
        """
        places, per_head = list[RowPlace](), {BY_HEAD: 1, BY_QUERY: kv_heads, BY_KEY: num_heads}
        ends: dict[str, int] = dict.fromkeys(per_head, 0)
        for of_function, row in self.rows():
            kind, reads_head = kind_of_row(row), "h" in row.reads
            if of_function == name:
                places.append(RowPlace(kind, ends[kind], reads_head))
            ends[kind] += per_head[kind] if reads_head else 1
        return places

    def num_lines(self, num_heads: int) -> int:
        """Returns the number of lines of the values per key."""
        return self._count(BY_KEY, num_heads)

    def num_planes(self, kv_heads: int) -> int:
        """Returns the number of planes of the values per query row."""
        return self._count(BY_QUERY, kv_heads)

    def _count(self, kind: str, per_head: int) -> int:
        return sum(per_head if "h" in row.reads else 1 for _, row in self.rows() if kind_of_row(row) == kind)


def paged_functions(record: PagedAttention) -> PagedFunctions | None:
    """Returns the functions of a record; None if it has none."""
    if record.score_mod is None and record.mask_mod is None:
        return None
    return PagedFunctions(*(None if x is None else _split(x) for x in (record.score_mod, record.mask_mod)))


def _split(function: PairFunction) -> SplitFunction:
    return split_function(function.program, computes_keys=True)


def paged_function_refusal_reasons(record: PagedAttention) -> Iterable[str]:
    """Yields why the paged-attention kernel cannot compute the functions of a record."""
    refused = False
    for reason in function_refusal_reasons(record, computes_keys=True):
        refused = True
        yield reason
    functions = paged_functions(record)
    if functions is None or refused:
        return
    group, keys = record.query.shape[1] // paged_cache.kv_heads(record), paged_cache.max_sequence_len(record)
    sizes = {"b": record.kv_lens.shape[0], "h": record.query.shape[1]}
    for name, row in functions.rows():
        if kind_of_row(row) != BY_KEY:
            continue
        if "h" in row.reads and group > MAX_GROUP_SIZE_BY_KEY:
            most = f"the kernel takes at most {MAX_GROUP_SIZE_BY_KEY}"
            yield f"{name}: got a value of head and key with {group} query heads per KV head, {most}"
        count = keys
        for index in row.reads & sizes.keys():
            count *= sizes[index]
        if count > MAX_VALUES_BY_KEY:
            yield f"{name}: got {count} values of keys, the kernel takes at most {MAX_VALUES_BY_KEY}"
        if "b" in row.reads and record.shared_prefix is not None:
            yield f"shared_prefix: got values of sequence and key in {name}, which keys of a prefix do not have"


def values_by_query(record: PagedAttention) -> jax.Array | None:
    """Returns the values per query row, int32 [T, H, values], bits of float32 among them; None if there are none."""
    sequence, position = paged_cache.token_sequences_and_positions(record)
    batch, heads = sequences_and_heads_in_call(record, jnp.maximum(sequence, 0))
    indices = (batch.reshape(-1, 1, 1, 1), heads.reshape(1, -1, 1, 1), position.reshape(-1, 1, 1, 1))
    return _values_in_lanes(record, BY_QUERY, (*indices, jnp.zeros((1, 1, 1, 1), jnp.int32)), record.query.shape[:2])


def values_by_head(record: PagedAttention) -> jax.Array | None:
    """Returns the values per query head, int32 [1, H, values]; None if there are none."""
    _, heads = sequences_and_heads_in_call(record, jnp.zeros(1, jnp.int32))
    zero = jnp.zeros((1, 1, 1, 1), jnp.int32)
    return _values_in_lanes(record, BY_HEAD, (zero, heads.reshape(1, -1, 1, 1), zero, zero), (1, heads.shape[0]))


def values_by_key(record: PagedAttention, num_heads: int, block_kv: int) -> jax.Array | None:
    """Returns the values per key, int32 [N|1, lines, 1, keys], in whole blocks; None if there are none.

    Args:
        record: The record.
        num_heads: The number of query heads, including those that are padding.
        block_kv: Keys per block.
    """
    sequences = jnp.arange(record.kv_lens.shape[0], dtype=jnp.int32)
    batch, heads = sequences_and_heads_in_call(record, sequences)
    keys = jnp.arange(cdiv(paged_cache.max_sequence_len(record), block_kv) * block_kv, dtype=jnp.int32)
    zero = jnp.zeros((1, 1, 1, 1), jnp.int32)
    indices = (batch.reshape(-1, 1, 1, 1), heads.reshape(1, -1, 1, 1), zero, keys.reshape(1, 1, 1, -1))
    lines = []
    for row, x in _values_of_kind(record, BY_KEY, indices):
        padding = num_heads - x.shape[1] if "h" in row.reads else 0
        lines.append(jnp.pad(x[:, :, 0], ((0, 0), (0, padding), (0, 0))))
    if not lines:
        return None
    rows = max(x.shape[0] for x in lines)
    return jnp.concatenate([jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in lines], axis=1)[:, :, None]


def _values_in_lanes(
    record: PagedAttention, kind: str, indices: tuple[jax.Array, ...], shape: tuple[int, ...]
) -> jax.Array | None:
    values = [jnp.broadcast_to(x[:, :, 0, 0], shape) for _, x in _values_of_kind(record, kind, indices)]
    return jnp.stack(values, axis=-1) if values else None


def _values_of_kind(
    record: PagedAttention, kind: str, indices: tuple[jax.Array, ...]
) -> Iterator[tuple[Row, jax.Array]]:
    """Yields the values of one kind as int32, with the bits of float32."""
    for function in (record.score_mod, record.mask_mod):
        if function is not None:
            rows = [row for row in _split(function).rows if kind_of_row(row) == kind]
            for row, x in zip(rows, row_values(function, rows, indices), strict=True):
                yield row, _as_int32(x.astype(row.dtype))


def _as_int32(x: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.int32)
