"""Conformance cases of this kernel: rows of several blocks of keys, in caches that are whole large pages."""

from ejkernel.modules.operations.cases.mla_decode import DecodeSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.mla_decode import MLADecodeArguments
from ejkernel.ops.model import LONG_ROWS_TAG, Case

LONG_ROWS: tuple[Row[DecodeSizes], ...] = (
    (
        "long rows, lse",
        DecodeSizes(s=2560, h=4, g=2, lengths=(2500, 0, 2100)),
        lambda key: {"return_lse": True},
        (),
        (LONG_ROWS_TAG,),
    ),
)
"""A cache of 2560 tokens has pages of 512 slots; a slightly longer one has smaller pages."""


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of the operation, by its name."""
    return {"mla_decode": make_cases_of_rows(MLADecodeArguments, make_arrays, LONG_ROWS)}
