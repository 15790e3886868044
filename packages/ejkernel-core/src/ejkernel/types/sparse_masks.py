"""Patterns of attention that are known when a call is traced, so that what they mask is never computed.

A `Mask` says which (query, key) pairs attend, by index in the whole call. It is hashable and has no arrays in it (but
for `NumpyMask`), so it is part of what a call is compiled for. Kernels ask it two things: which tiles have some and
which have only attending pairs, on the host, and which pairs of one tile attend, as a JAX array.

Names and meanings follow the masks of splash attention (JAX, `jax.experimental.pallas.ops.tpu.splash_attention`).
"""

import abc
import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types.integers import NO_LIMIT, as_offset, check_int, is_int, limit_or_none

Shape = tuple[int, int]


class TileSpans(NamedTuple):
    """Runs of indices, one per tile: `low <= index <= high`, int arrays of one shape."""

    low: np.ndarray
    high: np.ndarray


class TileOccupancy(NamedTuple):
    """Two bool arrays [rows, columns]: for every tile, whether some pair may attend (False: no pair does), and whether
    every pair does.

    A combination of masks may call a full or empty tile mixed, but it never leaves out a pair that attends or adds a
    pair.
    """

    any_allowed: np.ndarray
    all_allowed: np.ndarray


@dataclasses.dataclass(frozen=True)
class Mask(abc.ABC):
    """A mask of pairs that attend, the same for all batch rows. Masks combine with `&` and `|`.

    Attributes:
        shape: (queries, keys) of the whole call.

    Raises:
        ValueError: From the constructors and from `&` and `|`, where sizes are wrong or do not fit each other.
    """

    shape: Shape

    def __post_init__(self) -> None:
        shape: Any = self.shape
        if not (isinstance(shape, tuple | list) and len(shape) == 2 and all(is_int(n) and n >= 1 for n in shape)):
            raise ValueError(f"shape: got {shape!r}, wants (queries, keys), two ints of at least 1")
        object.__setattr__(self, "shape", (int(shape[0]), int(shape[1])))

    @property
    def heads(self) -> int | None:
        """Returns how many query heads have a pattern of their own; None where all have the same."""
        return None

    def of_head(self, head: int) -> "Mask":
        """Returns the pattern of one query head."""
        return self

    @abc.abstractmethod
    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        """Returns which pairs of a tile attend, of a mask that is the same for all heads.

        Args:
            query: First query index, may be traced.
            key: First key index, may be traced.
            sizes: Queries and keys in the tile.

        Returns:
            bool, of shape `sizes`.
        """

    @abc.abstractmethod
    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        """Sorts tiles, on the host; nothing as large as `shape` is made but by masks that hold it already.

        Args:
            queries: What each row of tiles covers.
            keys: What each column of tiles covers.
        """

    def __and__(self, other: "Mask") -> "Mask":
        return _combine_masks(_IntersectionMask, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _combine_masks(_UnionMask, self, other)


@final
@dataclasses.dataclass(frozen=True)
class FullMask(Mask):
    """Every pair."""

    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        return jnp.ones(sizes, bool)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        ones = np.ones((queries.low.size, keys.low.size), bool)
        return TileOccupancy(ones, ones)


@dataclasses.dataclass(frozen=True)
class _DiagonalBandMask(Mask, abc.ABC):
    """`offset - left <= key - query <= offset + right`; None is unbounded."""

    @property
    @abc.abstractmethod
    def diagonal_range(self) -> tuple[int | None, int | None]:
        """Returns smallest and largest `key - query`."""

    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        least, most = self.diagonal_range
        steps = key - query + jnp.arange(sizes[1], dtype=jnp.int32) - jnp.arange(sizes[0], dtype=jnp.int32)[:, None]
        inside = jnp.ones(sizes, bool)
        inside = inside if least is None else inside & (steps >= least)
        return inside if most is None else inside & (steps <= most)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        least, most = self.diagonal_range
        low, high = keys.low - queries.high[:, None], keys.high - queries.low[:, None]
        some = every = np.ones(low.shape, bool)
        if least is not None:
            some, every = some & (high >= least), every & (low >= least)
        if most is not None:
            some, every = some & (low <= most), every & (high <= most)
        return TileOccupancy(some, every)


@final
@dataclasses.dataclass(frozen=True)
class CausalMask(_DiagonalBandMask):
    """Keys up to the query's own index.

    Attributes:
        offset: Added to the query's index: the first query stands at key `offset`.
        shard_count: Taken for the sake of code written for splash attention; shards find their part by themselves.
    """

    offset: int = 0
    shard_count: int = dataclasses.field(default=1, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "offset", as_offset(self.offset))

    @property
    def diagonal_range(self) -> tuple[int | None, int | None]:
        return None, self.offset


@final
@dataclasses.dataclass(frozen=True)
class LocalMask(_DiagonalBandMask):
    """Keys from `left` before to `right` after the query's own index, inclusive.

    Attributes:
        window_size: (left, right), ints >= 0 or None for unbounded.
        offset: Added to the query's index.
    """

    window_size: tuple[int | None, int | None]
    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "offset", as_offset(self.offset))
        window: Any = self.window_size
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window_size: got {window!r}, wants (left, right)")
        for side in window:
            if side is not None:
                check_int("window_size", side, least=0)
        object.__setattr__(self, "window_size", tuple(map(limit_or_none, window)))

    @property
    def diagonal_range(self) -> tuple[int | None, int | None]:
        left, right = self.window_size
        return None if left is None else self.offset - left, None if right is None else self.offset + right


@final
@dataclasses.dataclass(frozen=True)
class ChunkedCausalMask(Mask):
    """Keys of the query's own chunk, up to its own index.

    Attributes:
        chunk_size: Indices a chunk, counted from 0.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("chunk_size", self.chunk_size, least=1)
        object.__setattr__(self, "chunk_size", min(self.chunk_size, NO_LIMIT))

    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        q = query + jnp.arange(sizes[0], dtype=jnp.int32)[:, None]
        k = key + jnp.arange(sizes[1], dtype=jnp.int32)
        return (q // self.chunk_size == k // self.chunk_size) & (k <= q)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        q_low, q_high, k_low, k_high = queries.low[:, None], queries.high[:, None], keys.low, keys.high
        first, last = (np.minimum(q_low, k_low), np.maximum(q_high, k_high))
        one = first // self.chunk_size == last // self.chunk_size
        # The closest causal pairs are those of the last index of one tile and the first index of the other.
        some = (k_low <= q_high) & (k_high // self.chunk_size >= q_low // self.chunk_size)
        return TileOccupancy(some, one & (k_high <= q_low))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class NumpyMask(Mask):
    """An array that says it pair by pair; compiled into the call, and as large as it is.

    Attributes:
        array: bool [queries, keys], True attends.
    """

    shape: Shape = dataclasses.field(init=False)
    array: np.ndarray

    def __post_init__(self) -> None:
        array = np.array(self.array, dtype=bool)  # a copy, which the caller cannot change
        array.flags.writeable = False
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "shape", array.shape)
        super().__post_init__()

    @functools.cached_property
    def digest(self) -> str:
        """Returns hex digits that stand for the array."""
        return hashlib.blake2b(np.packbits(self.array).tobytes(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumpyMask) and (self.shape, self.digest) == (other.shape, other.digest)

    def __hash__(self) -> int:
        return hash((self.shape, self.digest))

    def __repr__(self) -> str:
        return f"NumpyMask(shape={self.shape}, digest={self.digest})"

    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        return lax.dynamic_slice(jnp.asarray(self.array), (jnp.int32(query), jnp.int32(key)), sizes)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        some = np.zeros((queries.low.size, keys.low.size), bool)
        every = some.copy()
        for row, (low, high) in enumerate(zip(*queries, strict=True)):
            part = self.array[low : high + 1]
            some_pairs, all_pairs = np.asarray(part.any(axis=0)), np.asarray(part.all(axis=0))
            for column, (start, end) in enumerate(zip(*keys, strict=True)):
                some[row, column] = some_pairs[start : end + 1].any()
                every[row, column] = all_pairs[start : end + 1].all()
        return TileOccupancy(some, every)


@final
@dataclasses.dataclass(frozen=True)
class MultiHeadMask(Mask):
    """A pattern for every query head.

    Attributes:
        masks: One per head, each the same for all heads.
    """

    shape: Shape = dataclasses.field(init=False)
    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        masks: tuple[Any, ...] = tuple(self.masks)
        if not masks or any(not isinstance(mask, Mask) or mask.heads is not None for mask in masks):
            raise ValueError(f"masks: got {masks!r}, wants at least one mask, none of them a MultiHeadMask")
        object.__setattr__(self, "masks", masks)
        object.__setattr__(self, "shape", masks[0].shape)
        for mask in masks:
            _check_same_shape(masks[0], mask)
        super().__post_init__()

    @property
    def heads(self) -> int | None:
        return len(self.masks)

    def of_head(self, head: int) -> Mask:
        return self.masks[head]

    @functools.cached_property
    def distinct_masks(self) -> tuple[Mask, ...]:
        """Returns the different ones among the masks."""
        return tuple(dict.fromkeys(self.masks))

    @functools.cached_property
    def mask_index_by_head(self) -> tuple[int, ...]:
        """Returns, for every head, the index of its mask among the distinct masks."""
        index = {mask: n for n, mask in enumerate(self.distinct_masks)}
        return tuple(index[mask] for mask in self.masks)

    def __repr__(self) -> str:
        return f"MultiHeadMask(distinct={self.distinct_masks}, which={self.mask_index_by_head})"

    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        raise ValueError("a MultiHeadMask allows different pairs in different heads; call the mask of one head")

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        """Returns the tiles in which a pair of some head attends, and those in which all pairs of all heads do."""
        parts = [mask.tiles(queries, keys) for mask in self.distinct_masks]
        return TileOccupancy(
            np.any([part.any_allowed for part in parts], axis=0), np.all([part.all_allowed for part in parts], axis=0)
        )


@dataclasses.dataclass(frozen=True)
class _CombinedMask(Mask, abc.ABC):
    """Two masks of one shape."""

    shape: Shape = dataclasses.field(init=False)
    one: Mask
    other: Mask

    def __post_init__(self) -> None:
        _check_same_shape(self.one, self.other)
        object.__setattr__(self, "shape", self.one.shape)


@final
@dataclasses.dataclass(frozen=True)
class _IntersectionMask(_CombinedMask):
    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        return self.one.allowed(query, key, sizes) & self.other.allowed(query, key, sizes)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        one, other = self.one.tiles(queries, keys), self.other.tiles(queries, keys)
        return TileOccupancy(one.any_allowed & other.any_allowed, one.all_allowed & other.all_allowed)


@final
@dataclasses.dataclass(frozen=True)
class _UnionMask(_CombinedMask):
    def allowed(self, query: Any, key: Any, sizes: Shape) -> jax.Array:
        return self.one.allowed(query, key, sizes) | self.other.allowed(query, key, sizes)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        one, other = self.one.tiles(queries, keys), self.other.tiles(queries, keys)
        return TileOccupancy(one.any_allowed | other.any_allowed, one.all_allowed | other.all_allowed)


def diagonal_range_of(mask: Mask) -> tuple[int | None, int | None] | None:
    """Returns smallest and largest `key - query` of a pattern that is one band, None where a side is open; None for any
    other.

    Kernels mask a band by arithmetic, so a pattern that is one needs no lists of tiles.
    """
    if isinstance(mask, FullMask):
        return None, None
    if isinstance(mask, _DiagonalBandMask):
        return mask.diagonal_range
    if not isinstance(mask, _IntersectionMask):
        return None
    one, other = diagonal_range_of(mask.one), diagonal_range_of(mask.other)
    if one is None or other is None:
        return None
    (least, most), (other_least, other_most) = one, other
    lower = [side for side in (least, other_least) if side is not None]
    upper = [side for side in (most, other_most) if side is not None]
    return max(lower, default=None), min(upper, default=None)


def _combine_masks(kind: type[_CombinedMask], one: Any, other: Any) -> Mask:
    if not isinstance(other, Mask):
        return NotImplemented
    _check_same_shape(one, other)
    heads = one.heads or other.heads
    if heads is None:
        return kind(one, other)
    if None not in (one.heads, other.heads) and one.heads != other.heads:
        raise ValueError(f"masks: got {one.heads} and {other.heads} heads, wants equal numbers of heads")
    return MultiHeadMask(tuple(kind(one.of_head(h), other.of_head(h)) for h in range(heads)))


def _check_same_shape(one: Mask, other: Mask) -> None:
    if one.shape != other.shape:
        raise ValueError(f"masks: got shapes {one.shape} and {other.shape}, wants equal shapes")
