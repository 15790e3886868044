"""The selected attention family: each query attends to blocks of keys that it lists, and to summaries of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.families.contract import Family, RequestIsolation
from ejkernel.families.selected_attention.isolation import isolate_selected, isolate_selected_pullback
from ejkernel.families.selected_attention.record import (
    GATE_FIELD_BY_BRANCH,
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    block_positions,
    blocks_per_query,
    compressed,
    num_keys,
    num_listable_blocks,
    query_positions,
    select,
    starts,
    sum_of_gated_branches,
    window,
)
from ejkernel.families.selected_attention.reference import reference
from ejkernel.families.tiled_attention.isolation import has_segments
from ejkernel.planning.requests import PADDING, UNUSED, claim_entries, segment_owners

__all__ = [
    "FAMILY",
    "GATE_FIELD_BY_BRANCH",
    "BranchResiduals",
    "SelectedAttention",
    "SelectedResiduals",
    "apply_shard_offsets",
    "axes",
    "block_positions",
    "blocks_per_query",
    "compressed",
    "num_keys",
    "num_listable_blocks",
    "query_positions",
    "reference",
    "requests",
    "select",
    "starts",
    "sum_of_gated_branches",
    "window",
]


def apply_shard_offsets(record: SelectedAttention, offsets: Mapping[str, jax.Array]) -> SelectedAttention:
    """Makes one shard's record mean its part of the global call: the keys are all there, the queries are some."""
    queries = offsets.get("t")
    if queries is None or record.q_positions is not None:
        return record
    return dataclasses.replace(record, q_positions=query_positions(record) + queries)


def requests(record: SelectedAttention) -> tuple[dict[str, Any], ...]:
    """Returns the request that each entry of a record belongs to: its segment, also for compressed keys, or its row;
    for a page, the row whose table lists it.
    """
    if record.block_tables is not None:
        return (_page_owners(record),)
    ids = [np.asarray(x) for x in (record.q_segment_ids, record.kv_segment_ids) if x is not None]
    if not ids:
        return ({"b": np.arange(record.query.shape[0])},)
    if record.compressed_segment_ids is not None:
        ids.append(np.asarray(record.compressed_segment_ids))
    owners = segment_owners(np.concatenate(ids, axis=1))
    parts = np.split(owners, np.cumsum([x.shape[1] for x in ids])[:-1], axis=1)
    return (dict(zip(("b t", "b s", "b m"), parts, strict=False)),)


def _page_owners(record: SelectedAttention) -> dict[str, Any]:
    """Returns the row that owns each query, compressed key and slot of a page."""
    tables, (pages, size) = np.asarray(record.block_tables), record.key.shape[:2]
    owners = np.full((pages, size), UNUSED)
    for row, entry in zip(*np.nonzero((tables >= 0) & (tables < pages)), strict=True):
        claim_entries(owners, tables[row, entry], row)
    rows = np.arange(tables.shape[0])
    ids = {"b t": record.q_segment_ids, "b m": record.compressed_segment_ids}
    placed = {axes: np.where(np.asarray(x) >= 0, rows[:, None], PADDING) for axes, x in ids.items() if x is not None}
    return {"b": rows, "p s": owners, **placed}


def axes(record: SelectedAttention) -> Mapping[str, Any]:
    """Returns axis letters of a record's fields and of its output. The axis of pages is not the batch axis."""
    row = "b" if record.block_tables is None else "p"
    return AXES | {"key": f"{row} s g d", "value": f"{row} s g v"}


AXES = {
    "query": "b t h d",
    "block_indices": "b t g k",
    "block_starts": "m",
    "compressed_key": "b m g d",
    "compressed_value": "b m g v",
    "compressed_segment_ids": "b m",
    "q_segment_ids": "b t",
    "kv_segment_ids": "b s",
    "q_positions": "b t",
    "g_slc": "b t h",
    "g_cmp": "b t h",
    "g_swa": "b t h",
    "block_tables": "b n",
    "output": "b t h v",
}
"""Axis letters of all fields, except key and value, which may be pages."""


def invariances(record: SelectedAttention) -> frozenset[str]:
    """Returns what the rows of a record may depend on; `packing` and `pages` are included only if there are any."""
    names = {"packing": record.q_segment_ids, "pages": record.block_tables}
    return frozenset({"batch", "padding", "chunking", *(name for name, x in names.items() if x is not None)})


FAMILY = Family(
    name="selected_attention",
    record=SelectedAttention,
    differentiable=("query", "key", "value", "compressed_key", "compressed_value", "g_slc", "g_cmp", "g_swa"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes=axes,
    shardable="bthg",
    aligned=(("h", "g"),),
    apply_shard_offsets=apply_shard_offsets,
    reference=reference,
    requests=requests,
    request_isolation=RequestIsolation(
        record=isolate_selected, pullback=isolate_selected_pullback, may_share_tiles=has_segments
    ),
    invariances=invariances,
)
