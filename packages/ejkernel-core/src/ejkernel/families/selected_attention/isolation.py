"""Segments of selected attention, kept apart as `ejkernel.families.tiled_attention.isolation` does it."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.families.tiled_attention.isolation import FIELDS, finite_or_zero, finite_rows, nonfinite_values_to_keys


def isolate_selected(record: Any) -> Any:
    """Returns a record of selected attention whose values are finite, those of compressed blocks too;
    keys are marked. Pages are unchanged, since a query reads only those of its row.
    """
    if not _has_padding(record):
        return record
    fields = nonfinite_values_to_keys(record.key, record.value) if record.block_tables is None else {}
    if record.compressed_key is not None and record.compressed_value is not None:
        compressed = nonfinite_values_to_keys(record.compressed_key, record.compressed_value)
        fields |= {f"compressed_{name}": x for name, x in compressed.items()}
    return dataclasses.replace(record, **fields)


def isolate_selected_pullback(pullback: Any) -> Any:
    """Returns a pullback of selected attention whose arrays are finite, with lse NaN in rows that had
    something else.
    """
    record, residuals = pullback.record, pullback.residuals
    if not _has_padding(record):
        return pullback
    branches = {name: getattr(residuals, name) for name in ("selected", "compressed", "window")}
    branches = {name: branch for name, branch in branches.items() if branch is not None}
    finite = finite_rows(record.query) & finite_rows(pullback.output) & finite_rows(pullback.cotangent)
    for branch in branches.values():
        finite &= finite_rows(branch.output) & (jnp.isfinite(branch.lse) | (branch.lse == -jnp.inf))
    for gate in (record.g_slc, record.g_cmp, record.g_swa):
        finite = finite if gate is None else finite & jnp.isfinite(gate).swapaxes(1, 2)
    finite |= (record.q_segment_ids < 0)[:, None]
    marked = {
        name: dataclasses.replace(
            branch, output=finite_or_zero(branch.output), lse=jnp.where(finite, branch.lse, jnp.nan)
        )
        for name, branch in branches.items()
    }
    arrays = FIELDS if record.block_tables is None else ("query",)
    names = (*arrays, "compressed_key", "compressed_value", "g_slc", "g_cmp", "g_swa")
    fields = {name: getattr(record, name) for name in names}
    return dataclasses.replace(
        pullback,
        record=dataclasses.replace(record, **{n: finite_or_zero(x) for n, x in fields.items() if x is not None}),
        residuals=dataclasses.replace(residuals, **marked),
        output=finite_or_zero(pullback.output),
        cotangent=finite_or_zero(pullback.cotangent),
    )


def _has_padding(record: Any) -> bool:
    """Returns whether a record has segment ids of queries and of the keys that they attend to."""
    has_key_ids = record.kv_segment_ids is not None or record.block_tables is not None
    return record.q_segment_ids is not None and has_key_ids
