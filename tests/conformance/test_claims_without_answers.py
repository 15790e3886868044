"""Claims to handle a field without which the reference has no answer."""

import pytest

from ejkernel.ops.plugins import registry
from ejkernel_conformance import claims

OP = registry().ops["state_space_v1"]


@pytest.mark.parametrize("name", ["cu_seqlens", "state_slots"])
def test_fields_without_which_there_is_no_call_matter(name):
    """Slots are no states of sequences, and dropping `state_slots` leaves a record that means nothing."""
    cases = [case for case in OP.cases if name in case.exercises]
    assert cases
    assert all(claims.matters(OP, case, name) for case in cases)
