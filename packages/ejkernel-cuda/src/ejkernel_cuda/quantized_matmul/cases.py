"""Conformance cases of the quantised matmul's kernels: partial tiles, shares and chunks in both layouts."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.quantized_matmul import MatmulSizes, make_base_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.quantized_matmul import QuantizedMatmulArguments
from ejkernel.ops.model import Case


def _row(name: str, handled_fields: tuple[str, ...] = ("zeros",), options: Any = None, **sizes: Any) -> Row[Any]:
    """Returns a row of the table of cases, in bfloat16 and with groups of 64 by default."""
    fields: dict[str, Any] = {"group_size": 64, "dtype": jnp.bfloat16, **sizes}
    sizes_of_case = MatmulSizes(**fields)
    return (name, sizes_of_case, lambda k: options or {}, handled_fields, ())


_CASE_SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one row", {"m": 1, "k": 192, "n": 384}),
    ("rows of scales that are aligned", {"m": 9, "k": 512, "n": 512}),
    ("three tiles of rows", {"m": 33, "k": 384, "n": 640}),
    ("two chunks", {"m": 5, "k": 1152, "n": 128}),
)
_CASE_TABLE: tuple[Row[Any], ...] = (
    *(
        _row(f"int4, {name}{', transposed' if transpose else ''}", transpose=transpose, **sizes)
        for transpose in (False, True)
        for name, sizes in _CASE_SIZES
    ),
    _row("int4, groups of 128, transposed", m=20, k=384, n=320, group_size=128, transpose=True),
    # Enough contracted elements that `candidates` includes blocks that contract all of them.
    _row("int4, a share for every warp, transposed", m=9, k=4096, n=96, transpose=True),
    _row("int4, warpgroups, 32 rows, transposed", m=20, k=768, n=300, transpose=True),
    _row("int4, warpgroups, 64 rows, transposed", m=50, k=1280, n=260, transpose=True),
    _row("int4, partial step", m=20, k=72, n=128),
    _row("int4, warpgroups, 32 rows", m=20, k=712, n=640),
    _row("int4, warpgroups, 64 rows", m=50, k=1032, n=384),
    _row("int4, square", ("zeros", "transpose"), k=128, n=128, transpose=True),
    # With `transpose` both implementations serve the case, and each must show that it handles the argument.
    _row("int4, precision", ("zeros", "precision"), {"precision": jax.lax.Precision.HIGHEST}, k=128, transpose=True),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"quantized_matmul": make_cases_of_rows(QuantizedMatmulArguments, make_base_inputs, _CASE_TABLE)}
