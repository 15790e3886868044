"""Grouped matmul written out row by row in NumPy float64, from its definition and from nothing else of the project."""

from typing import Any

import numpy as np


def grouped_matmul(
    lhs: np.ndarray,
    rhs: np.ndarray,
    group_sizes: list[int],
    group_offset: int = 0,
    existing_out: np.ndarray | None = None,
    rhs_scale: np.ndarray | None = None,
    rhs_bias: np.ndarray | None = None,
    transpose_rhs: bool = False,
    lhs_scale: np.ndarray | None = None,
) -> np.ndarray:
    """The output, float64 [M, N]."""
    matrices = [_matrix(each, scale, transpose_rhs) for each, scale in zip(rhs, _each(rhs_scale, rhs), strict=True)]
    output = np.zeros((len(lhs), matrices[0].shape[1]))
    if existing_out is not None:
        output += existing_out
    owners = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    for row, group in zip(range(len(lhs)), owners, strict=False):
        given = group - group_offset
        if 0 <= given < len(matrices):
            output[row] += _row(lhs[row].astype(float), None if lhs_scale is None else lhs_scale[row]) @ matrices[given]
            if rhs_bias is not None:
                output[row] += rhs_bias[given, 0]
    return output


def _row(row: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """[K], block by block."""
    return (
        row if scale is None else np.concatenate([x * y for x, y in zip(np.split(row, len(scale)), scale, strict=True)])
    )


def _matrix(rhs: np.ndarray, scale: np.ndarray | None, transposed: bool) -> np.ndarray:
    """[K, N], block by block of its rows."""
    matrix = (rhs.T if transposed else rhs).astype(float)
    if scale is not None:
        block = len(matrix) // len(scale)
        for row in range(len(matrix)):
            matrix[row] *= scale[row // block, 0]
    return matrix


def _each(optional: np.ndarray | None, like: Any) -> Any:
    return [None] * len(like) if optional is None else optional
