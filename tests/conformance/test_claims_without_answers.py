"""Claims to handle a field without which the reference has no answer."""

from collections import defaultdict

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


def test_a_claim_is_shown_on_a_case_whose_answers_are_known(monkeypatch):
    """Implementations that claim a field share answers: a later case is taken where its answers are known."""
    implementation = next(i for i in registry().implementations[OP.name] if i.name == "xla")
    *_, first, last = [case for case in OP.cases if "cu_seqlens" in case.exercises]
    cases, asked = [(OP, first), (OP, last)], []
    monkeypatch.setattr(claims, "_answered", defaultdict(set, {(OP, last): {"cu_seqlens"}}))
    monkeypatch.setattr(claims, "matters", lambda op, case, name: asked.append(case) or True)
    claims.check_claim(implementation, "cu_seqlens", cases)
    assert asked == [last]
    monkeypatch.setattr(claims, "matters", lambda op, case, name: False)
    with pytest.raises(AssertionError, match="another answer without it"):
        claims.check_claim(implementation, "cu_seqlens", cases)
