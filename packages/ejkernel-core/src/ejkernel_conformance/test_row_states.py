"""States of rows, from which devices that split tokens compute what they exchange."""

from ejkernel_conformance import row_states
from ejkernel_conformance.served import row_states_refused, unless
from ejkernel_conformance.subjects import Subject


@unless(row_states_refused)
def test_row_states(ejk_row_states: Subject) -> None:
    """Summaries of shards with `Implementation.row_states` are those of the reference."""
    row_states.check_row_states(ejk_row_states)
