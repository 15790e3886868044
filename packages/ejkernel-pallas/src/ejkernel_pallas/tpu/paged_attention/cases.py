"""Conformance cases of this kernel: a soft cap without biases, which no other case has."""

from ejkernel.modules.operations.cases.paged import MIXED_BATCH_SIZES
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes, chunked_prefill_inputs, packed_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.chunked_prefill_paged_decode import ChunkedPrefillPagedDecodeArguments
from ejkernel.modules.operations.unified_attention import UnifiedAttentionArguments
from ejkernel.ops.model import Case


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    rows: tuple[Row[PagedSizes], ...] = (
        ("soft cap", MIXED_BATCH_SIZES, lambda key: {"logits_soft_cap": 1.5}, ("logits_soft_cap",), ()),
    )
    return {
        "unified_attention": make_cases_of_rows(UnifiedAttentionArguments, packed_inputs, rows),
        "chunked_prefill_paged_decode": make_cases_of_rows(
            ChunkedPrefillPagedDecodeArguments, chunked_prefill_inputs, rows
        ),
    }
