"""Inputs for the operations over paged caches: batches of sequences in a cache, and arguments of given shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.modules.operations.cases.tables import fill_arguments, normal_like


@dataclasses.dataclass(frozen=True)
class PagedSizes:
    """A batch of sequences in a cache.

    Attributes:
        kv_lens: Tokens of each sequence.
        q_lens: How many of them are queries; None for the newest one each.
        query_rows: Query rows in all; None for those of the sequences.
        h: Query heads.
        g: KV heads.
        d: Head size.
        v: Value size.
        s: Slots of a page.
        pages_per_table: Entries of a table; None for just enough.
        dtype: Of queries and caches.
    """

    kv_lens: tuple[int, ...] = (37, 1, 0, 64)
    q_lens: tuple[int, ...] | None = None
    query_rows: int | None = None
    h: int = 4
    g: int = 2
    d: int = 32
    v: int = 32
    s: int = 16
    pages_per_table: int | None = None
    dtype: Any = jnp.float32

    @property
    def num_query_rows(self) -> int:
        """Returns the number of query rows."""
        return self.query_rows or (len(self.kv_lens) if self.q_lens is None else sum(self.q_lens))

    @property
    def num_pages(self) -> int:
        """Returns the number of pages of the cache: the pages in use and three more."""
        return sum(cdiv(n, self.s) for n in self.kv_lens) + 3

    def block_tables(self) -> np.ndarray:
        """Returns int32 [N, entries]: shuffled pages, each of one sequence; what lies past a length is no page of its
        own.
        """
        entries = self.pages_per_table or max(1, *(cdiv(n, self.s) for n in self.kv_lens))
        order = iter(np.random.default_rng(len(self.kv_lens)).permutation(self.num_pages))
        padding = np.array([0, -1, self.num_pages + 7])[np.arange(len(self.kv_lens) * entries) % 3]
        tables = padding.reshape(len(self.kv_lens), entries)
        for row, n in zip(tables, self.kv_lens, strict=True):
            row[: cdiv(n, self.s)] = [next(order) for _ in range(cdiv(n, self.s))]
        return tables.astype(np.int32)

    def query_start_loc(self) -> np.ndarray:
        """Returns int32 [N + 1], first query row of each sequence."""
        return np.cumsum((0, *(self.q_lens or ()))).astype(np.int32)


Arrays = dict[str, jax.Array]


def normal_arrays(key: jax.Array, dtype: Any, /, **shapes: tuple[int, ...]) -> Arrays:
    """Returns normal arrays by name."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape, jnp.float32).astype(dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def key_and_value_cache(key: jax.Array, sizes: PagedSizes) -> Arrays:
    """Returns key and value cache [P, S, Hk, D]; the slots that hold no token are NaN, so that reading one shows."""
    z, used = sizes, _used_slots(sizes)
    stored = normal_arrays(
        key, z.dtype, key_cache=(z.num_pages, z.s, z.g, z.d), value_cache=(z.num_pages, z.s, z.g, z.v)
    )
    return {name: jnp.where(used[:, :, None, None], x, jnp.nan) for name, x in stored.items()}


def _used_slots(sizes: PagedSizes) -> np.ndarray:
    """Returns bool [P, S], the slots that hold tokens."""
    used = np.zeros((sizes.num_pages, sizes.s), bool)
    for row, n in zip(sizes.block_tables(), sizes.kv_lens, strict=True):
        for position in range(n):
            used[row[position // sizes.s], position % sizes.s] = True
    return used


def page_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `page_attention`."""
    z, keys = sizes, jax.random.split(key)
    return {
        **normal_arrays(keys[0], z.dtype, query=(z.num_query_rows, z.h, z.d)),
        **key_and_value_cache(keys[1], z),
        "kv_lens": jnp.array(z.kv_lens, jnp.int32),
        "block_tables": jnp.asarray(z.block_tables()),
        "kv_layout": "pshd",
    }


def packed_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `unified_attention`."""
    z, keys = sizes, jax.random.split(key)
    return {
        **normal_arrays(keys[0], z.dtype, queries=(z.num_query_rows, z.h, z.d)),
        **key_and_value_cache(keys[1], z),
        "kv_lens": jnp.array(z.kv_lens, jnp.int32),
        "block_tables": jnp.asarray(z.block_tables()),
        "query_start_loc": jnp.asarray(z.query_start_loc()),
    }


def v2_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `ragged_page_attention_v2`; the last sequence is not live, though it looks it."""
    fields = packed_inputs(key, sizes)
    keys, values = fields.pop("key_cache"), fields.pop("value_cache")
    pages = jnp.stack((keys, values), axis=3).reshape(*keys.shape[:2], -1, sizes.d)
    fields |= {"kv_pages": pages, "num_seqs": np.int32(len(sizes.kv_lens) - 1)}
    return fields


def v3_inputs(key: jax.Array, sizes: PagedSizes, in_lanes_layout: bool = False) -> dict[str, Any]:
    """Returns arguments of `ragged_page_attention_v3`; the last sequence is not live, though it looks it."""
    z, pack = sizes, 4 // jnp.dtype(sizes.dtype).itemsize
    shape = (cdiv(z.g, pack), pack, 128) if in_lanes_layout else (cdiv(2 * z.g, pack), pack, cdiv(z.d, 128) * 128)
    tokens = (z.num_query_rows, z.g, z.d)
    return {
        **normal_arrays(
            key,
            z.dtype,
            queries=(z.num_query_rows, z.h, z.d),
            keys=tokens,
            values=tokens,
            kv_cache=(z.num_pages, z.s, *shape),
        ),
        "kv_lens": jnp.array(z.kv_lens, jnp.int32),
        "block_tables": jnp.asarray(z.block_tables().reshape(-1)),
        "query_start_loc": jnp.asarray(z.query_start_loc()),
        "distribution": jnp.array([0, 0, len(z.kv_lens) - 1], jnp.int32),
    }


def v3_float8_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns the same with a cache of 8 bits a number and queries of 16."""
    eight = dataclasses.replace(sizes, dtype=jnp.float8_e4m3fn)
    fields = v3_inputs(key, eight)
    return {**fields, "queries": fields["queries"].astype(jnp.bfloat16)}


def v3_int8_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns the inputs of version 3 with a cache of int8."""
    fields = v3_inputs(key, dataclasses.replace(sizes, dtype=jnp.int8))
    names = ("keys", "values", "kv_cache")
    integer_fields = {
        name: jax.random.randint(k, fields[name].shape, -128, 128).astype(jnp.int8)
        for name, k in zip(names, jax.random.split(key, len(names)), strict=True)
    }
    return {**fields, **integer_fields, **normal_arrays(key, jnp.bfloat16, queries=fields["queries"].shape)}


def chunked_prefill_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `chunked_prefill_paged_decode`; the caches are written to, and compared, so they hold no
    NaN.
    """
    z, keys = sizes, jax.random.split(key)
    fields = {name: jnp.nan_to_num(x) for name, x in packed_inputs(keys[0], z).items()}
    return {
        **fields,
        **normal_arrays(keys[1], z.dtype, keys=(z.num_query_rows, z.g, z.d), values=(z.num_query_rows, z.g, z.v)),
    }


def decode_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `decode_attention`."""
    fields = page_inputs(key, sizes)
    return {
        "query": fields["query"],
        "key_buffer": fields["key_cache"].reshape(-1, sizes.g, sizes.d),
        "value_buffer": fields["value_cache"].reshape(-1, sizes.g, sizes.v),
        "req_to_tokens": fields["block_tables"],
        "kv_lens": fields["kv_lens"],
        "page_size": sizes.s,
    }


def prefill_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `prefill_page_attention`."""
    fields = packed_inputs(key, sizes)
    return {
        "query": fields["queries"],
        **{name: fields[name].transpose(2, 0, 1, 3) for name in ("key_cache", "value_cache")},
        "kv_lens": fields["kv_lens"],
        "page_indices": fields["block_tables"][0],
        "kv_layout": "hpsd",
    }


def ragged_decode_inputs(key: jax.Array, sizes: PagedSizes) -> dict[str, Any]:
    """Returns arguments of `ragged_decode_attention`, with `sizes.s` keys per row."""
    z, b = sizes, len(sizes.kv_lens)
    shapes = {"query": (b, z.h, z.d), "key": (b, z.s, z.g, z.d), "value": (b, z.s, z.g, z.v)}
    ends = jnp.array(z.kv_lens, jnp.int32)
    return {**normal_arrays(key, z.dtype, **shapes), "sequence_start": ends // 4, "sequence_end": ends}


def make_inputs(
    args: Any,
    key: jax.Array,
    *,
    tables_argument: str = "block_tables",
    cache_size: Callable[[Any], tuple[int, int]] = lambda args: args.key_cache.shape[:2],
) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, full tables, queries shared out
    evenly.

    Args:
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        key: PRNG key.
        tables_argument: Name of the argument with their tables.
        cache_size: args -> (pages, slots of a page).
    """
    names = [f.name for f in dataclasses.fields(args) if not f.metadata.get("static")]
    shapes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    pages, slots = cache_size(args)
    sequences = shapes["kv_lens"].shape[0]
    entries = int(np.prod(shapes[tables_argument].shape)) // sequences
    rows = next(x for name, x in shapes.items() if name in ("query", "queries", "queries_nope")).shape[0]
    known: Mapping[str, Callable[[tuple[int, ...]], Any]] = {
        "kv_lens": lambda shape: jnp.full(shape, entries * slots),
        tables_argument: lambda shape: jnp.arange(sequences * entries).reshape(shape) % pages,
        "query_start_loc": lambda shape: jnp.linspace(0, rows, shape[0]),
        "num_seqs": lambda shape: jnp.full(shape, sequences),
        "shared_prefix": jnp.zeros,
        "distribution": lambda shape: jnp.array([0, 0, sequences]),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    fields = {
        name: known[name](x.shape).astype(x.dtype)
        if name in known
        else jax.random.normal(keys[name], x.shape, jnp.float32).astype(x.dtype)
        for name, x in shapes.items()
    }
    return dataclasses.replace(args, **fields)


make_v2_inputs = functools.partial(make_inputs, cache_size=lambda args: args.kv_pages.shape[:2])
make_v3_inputs = functools.partial(make_inputs, cache_size=lambda args: args.kv_cache.shape[:2])
make_decode_inputs = functools.partial(
    make_inputs,
    tables_argument="req_to_tokens",
    cache_size=lambda args: (args.key_buffer.shape[0] // args.page_size, args.page_size),
)
make_prefill_inputs = functools.partial(
    make_inputs,
    tables_argument="page_indices",
    cache_size=lambda args: tuple(args.key_cache.shape[args.kv_layout.index(axis)] for axis in "ps"),
)


def make_ragged_decode_inputs(args: Any, key: jax.Array) -> Any:
    """Returns the same for `ragged_decode_attention`: every row attends to all of its keys."""
    ends = {"sequence_start": 0, "sequence_end": args.key.shape[1]}

    def make(name: str, shape: Any, key: jax.Array) -> jax.Array:
        return jnp.full(shape.shape, ends[name], shape.dtype) if name in ends else normal_like(key, shape)

    return fill_arguments(args, key, make)
