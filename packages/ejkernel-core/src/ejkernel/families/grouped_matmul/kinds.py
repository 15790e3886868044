"""Kinds of grouped matmul, by which shipped tables of measured configurations are sorted."""

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul.record import GroupedMatmul, columns

LARGE_MATRIX_ELEMENTS = 2**24
"""Elements of a matrix from which on it is large: caches hold no two of them."""


def average_rows_per_group(record: GroupedMatmul) -> int:
    """Returns rows of a group, about."""
    return cdiv(record.lhs.shape[0], max(1, record.group_sizes.shape[0]))


def shared_tuning_key(record: GroupedMatmul) -> str:
    """Returns what calls that share an entry have in common: dtypes, layout, rows of a group, and what else is
    computed.
    """
    rows = average_rows_per_group(record)
    fields = (f"lhs={record.lhs.dtype}", f"rhs={record.rhs.dtype}", f"out={jnp.dtype(record.out_dtype)}")
    count = "few" if rows <= 16 else "some" if rows <= 96 else "many"
    size = "large" if record.lhs.shape[1] * columns(record) >= LARGE_MATRIX_ELEMENTS else "small"
    present = [
        name
        for name in ("existing_out", "rhs_scale", "rhs_bias", "lhs_scale", "precision")
        if getattr(record, name) is not None
    ]
    return " ".join((*fields, f"transposed={record.transpose_rhs}", f"rows={count}", f"matrices={size}", *present))
