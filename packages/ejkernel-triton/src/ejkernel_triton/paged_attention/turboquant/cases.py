"""Conformance cases of the kernel over codes: sizes that it reads, in pages that no tile divides."""

import dataclasses

from ejkernel.modules.operations.cases import paged_turboquant
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.ragged_page_attention_v2_turboquant import RaggedPageAttentionv2TurboQuantArguments
from ejkernel.modules.operations.ragged_page_attention_v3_turboquant import RaggedPageAttentionv3TurboQuantArguments
from ejkernel.ops.model import Case

FEW_ROWS = {"kv_lens": (37, 1, 0, 64, 20), "q_lens": (3, 1, 0, 2, 1), "query_rows": 9, "s": 12}


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns cases by operation."""
    odd = dataclasses.replace(paged_turboquant.MIXED_SIZES, **FEW_ROWS, projections=16, key_bits=1, value_bits=2)
    rows: tuple[Row[paged_turboquant.TurboQuantSizes], ...] = (
        ("pages of 12, codes of 1 and 2 bits", odd, lambda key: {}, (*paged_turboquant.FORMAT_FIELDS, "num_seqs"), ()),
    )
    written = dataclasses.replace(paged_turboquant.MIXED_SIZES, **FEW_ROWS, projections=32, key_bits=4, value_bits=3)
    fields = (*paged_turboquant.FORMAT_FIELDS, *paged_turboquant.NEW_TOKEN_FIELDS)
    written_rows: tuple[Row[paged_turboquant.TurboQuantSizes], ...] = (
        ("writes, pages of 12, codes of 4 and 3 bits", written, lambda key: {}, fields, ()),
    )
    return {
        "ragged_page_attention_v2_turboquant": make_cases_of_rows(
            RaggedPageAttentionv2TurboQuantArguments, paged_turboquant.v2_inputs, rows
        ),
        "ragged_page_attention_v3_turboquant": make_cases_of_rows(
            RaggedPageAttentionv3TurboQuantArguments, paged_turboquant.v3_inputs, written_rows
        ),
    }
