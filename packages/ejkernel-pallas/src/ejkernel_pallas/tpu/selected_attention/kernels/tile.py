"""The shared code of the kernels of the selected branch: their refs, items of work, and rows of the queries of an item.

Rows of a token, its query heads, are whole registers in VMEM: [tokens, rows, 128]. The queries of an item are gathered
by loads at traced indices, which cost no more than other loads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, row_to_column
from ejkernel_pallas.tpu.selected_attention.config import header_words
from ejkernel_pallas.tpu.selected_attention.spec import LIMIT_BITS, TOKEN_BITS, SelectedSpec

ADDED_TOKENS = 4
"""The number of queries whose rows are loaded before any are stored, since loads do not pass stores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedRefs:
    """Refs of all kernels; a field that is None is not needed. Q queries of a tile, P parts of a tile of keys.

    Attributes:
        last_key_tile: int32, the last tile of keys of every tile of queries, for index maps.
        work_list: int32 [1, words], the work list of the tile of queries, in SMEM.
        query: [Q, rows, D].
        key: [P, keys, D].
        value: [P, keys, Dv].
        cotangent: [Q, rows, Dv], the cotangent of the output.
        lse: float32 [Q * rows / 128, 128], times log2 e in the backward pass.
        delta: float32 [Q * rows / 128, 128], <cotangent, output> of each row.
        output: [Q, rows, Dv].
        dquery: [Q, rows, D].
        dkey: float32 [P, keys, D].
        dvalue: float32 [P, keys, Dv].
        row_max: Scratch [Q + 1, rows, 128], the maximum of each row in every lane.
        row_sum: Scratch [Q + 1, rows, keys], sums of weights by lane.
        acc: Scratch [Q + 1, rows, Dv or D], the output or the gradient of queries.
        lse_in_all_lanes: Scratch [Q, rows, 128], lse in every lane.
        delta_in_all_lanes: Scratch [Q, rows, 128], delta in every lane.
        scores: Scratch [R * rows, keys], of the item between its first and its second stage.
        dweights: Scratch [R * rows, keys], the gradients of weights of the same item.
        weights: Scratch [R * rows, keys], of the item between its second and its third stage.
        dscores: Scratch [R * rows, keys], the gradients of scores of the same item.
        alpha: Scratch [R * rows, 128], the factors on `acc` of the same item.
        outside: Scratch [128, 128], 1 where sums of weights are too small or large, otherwise 0.
        must_repeat: Scratch in SMEM, int32 [1], whether a tile of queries has such sums.
    """

    last_key_tile: Ref
    work_list: Ref
    query: Ref
    key: Ref
    value: Ref
    cotangent: Ref = None
    lse: Ref = None
    delta: Ref = None
    output: Ref = None
    dquery: Ref = None
    dkey: Ref = None
    dvalue: Ref = None
    row_max: Ref = None
    row_sum: Ref = None
    acc: Ref = None
    lse_in_all_lanes: Ref = None
    delta_in_all_lanes: Ref = None
    scores: Ref = None
    dweights: Ref = None
    weights: Ref = None
    dscores: Ref = None
    alpha: Ref = None
    outside: Ref = None
    must_repeat: Ref = None


@dataclasses.dataclass(frozen=True)
class ProductItem:
    """One product: queries of a tile that read the same part.

    Attributes:
        part: The part's index in the tile of keys.
        tokens: The queries' indices in their tile; `spec.filler_token` where there are fewer than R.
        starts: The first key of the part that each of them attends to; None if that is 0 for all.
        limits: The end of the keys that each of them attends to.

    Starts and limits are registers, as the scalar units have more to do than the vector units.
    """

    part: Any
    tokens: list[Any]
    starts: list[Any] | None
    limits: list[Any]

    def queries(self, spec: SelectedSpec) -> list[Any]:
        """Returns the queries' indices, with an existing query in place of the filler."""
        if spec.block_q & (spec.block_q - 1) == 0:
            return [token & (spec.block_q - 1) for token in self.tokens]
        return [jnp.minimum(token, spec.block_q - 1) for token in self.tokens]


ItemStage = Callable[[ProductItem], None]


def for_each_item(
    refs: SelectedRefs, spec: SelectedSpec, key_tile: Any, stages: tuple[ItemStage, ItemStage, ItemStage]
) -> None:
    """Calls three stages with every item of a tile of queries and a tile of keys, as a pipeline:

        iteration      n          n + 1      n + 2
        item n         stage 0    stage 1    stage 2
        item n + 1                stage 0    stage 1    stage 2

    The stages of an iteration do not wait for each other: they pass arrays on in scratch memory, and a later stage
    loads what an earlier one overwrites. Before the first and after the last item are empty ones.
    """

    def step(n: Any, carry: Any) -> Any:
        for delay in reversed(range(len(stages))):
            stages[delay](_load_item(refs, spec, key_tile, n - delay))
        return carry

    fori_loop(refs.work_list[0, key_tile], refs.work_list[0, key_tile + 1], step, jnp.int32(0))


def _load_item(refs: SelectedRefs, spec: SelectedSpec, key_tile: Any, n: Any) -> ProductItem:
    """Loads an item from the work list."""
    at = header_words(spec.num_key_tiles) + n * (spec.readers_per_product + 1)
    entries = [refs.work_list[0, at + 1 + reader] for reader in range(spec.readers_per_product)]
    # An empty item may have a part of another tile of keys.
    part = jnp.clip(refs.work_list[0, at] - key_tile * spec.parts_per_tile, 0, spec.parts_per_tile - 1)
    tokens = [entry & ((1 << TOKEN_BITS) - 1) for entry in entries]
    shape = (spec.rows_per_token, spec.padded_keys_per_part)
    limits = [lax.shift_right_logical(jnp.full(shape, entry), jnp.int32(TOKEN_BITS)) for entry in entries]
    if spec.blocks_per_part == 1:
        return ProductItem(part, tokens, None, limits)
    first_of_second = spec.keys_per_part // spec.blocks_per_part
    starts = [lax.shift_right_logical(limit, jnp.int32(LIMIT_BITS)) * first_of_second for limit in limits]
    return ProductItem(part, tokens, starts, [limit & ((1 << LIMIT_BITS) - 1) for limit in limits])


def gather_token_rows(ref: Ref, tokens: list[Any]) -> jax.Array:
    """Returns the rows of some tokens, [tokens * rows, n]."""
    return jnp.concatenate([ref[token] for token in tokens], axis=0)


def scatter_token_rows(ref: Ref, tokens: list[Any], x: jax.Array) -> None:
    """Stores the rows of some tokens. No query is twice among the readers of a part."""
    rows = x.shape[0] // len(tokens)
    for n, token in enumerate(tokens):
        ref[token] = x[n * rows : (n + 1) * rows]


def add_token_rows(ref: Ref, tokens: list[Any], x: jax.Array) -> None:
    """Adds to the rows of some tokens. No query is twice among the readers of a part."""
    rows, step = x.shape[0] // len(tokens), ADDED_TOKENS
    for first in range(0, len(tokens), step):
        some = tokens[first : first + step]
        part = x[first * rows : (first + len(some)) * rows]
        scatter_token_rows(ref, some, gather_token_rows(ref, some) + part)


def attended_keys(item: ProductItem, spec: SelectedSpec) -> jax.Array:
    """Returns which keys the rows of an item attend to, [readers * rows, keys]."""
    key = lax.broadcasted_iota(jnp.int32, (spec.rows_per_token, spec.padded_keys_per_part), 1)
    if item.starts is None:
        return jnp.concatenate([key < limit for limit in item.limits], axis=0)
    ranges = zip(item.starts, item.limits, strict=True)
    return jnp.concatenate([(key >= start) & (key < limit) for start, limit in ranges], axis=0)


def for_each_row_group(spec: SelectedSpec, process_rows: Callable[[Any, Any], None]) -> None:
    """Calls `work(n, tokens)` with the tokens, as a slice, of every 128 rows of a tile of queries."""
    tokens = LANES // spec.rows_per_token

    def step(n: Any, carry: Any) -> Any:
        process_rows(n, pl.ds(n * tokens, tokens))
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(spec.block_q // tokens), step, jnp.int32(0))


def fill_token_rows(spec: SelectedSpec, ref: Ref, value: float) -> None:
    """Sets the rows of all queries of a tile."""

    def fill(_: Any, tokens: Any) -> None:
        ref[tokens] = jnp.full((LANES // spec.rows_per_token, *ref.shape[1:]), value, ref.dtype)

    for_each_row_group(spec, fill)


def copy_statistics_to_all_lanes(refs: SelectedRefs, spec: SelectedSpec) -> None:
    """Copies lse and delta of a tile of queries from lanes to all lanes of rows."""

    def copy_row_group(n: Any, tokens: Any) -> None:
        for source, target in ((refs.lse, refs.lse_in_all_lanes), (refs.delta, refs.delta_in_all_lanes)):
            target[tokens] = row_to_column(source[pl.ds(n, 1), :]).reshape(-1, spec.rows_per_token, LANES)

    for_each_row_group(spec, copy_row_group)
