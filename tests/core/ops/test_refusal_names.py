"""Refusals name the argument of the operation that was called, whatever its family calls the field."""

import pytest

from ejkernel.ops.plugins import registry
from ejkernel.ops.refusal_names import name_public_argument


@pytest.mark.parametrize(
    ("operation", "reason", "named"),
    [
        ("ragged_page_attention_v2", "key_pages: got 3 slots", "kv_pages: got 3 slots"),
        ("page_attention", "key_pages: got 3 slots", "key_cache: got 3 slots"),
        ("state_space_v1", "step: got dtype float16", "dt: got dtype float16"),
        ("flash_attention", "query: got 5", "query: got 5"),
        ("flash_attention", "dtype float64 is not among float32", "dtype float64 is not among float32"),
        ("flash_attention", "unheard_of: got 5", "unheard_of: got 5"),
    ],
)
def test_refusals_name_the_public_argument_of_a_record_field(operation, reason, named):
    assert name_public_argument(registry().ops[operation], reason) == named
