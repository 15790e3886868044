"""The check of states of rows, on the CPU: XLA's kernel stands in for one that computes them without a pass."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.families.linear_recurrence.record import states
from ejkernel.ops import grad
from ejkernel.ops.plugins import registry
from ejkernel_conformance import row_states
from ejkernel_conformance.selection import Selection
from ejkernel_conformance.served import row_states_refused

STAND_IN = "stand_in:row_states"


def states_by_the_reference(record, output_cotangent, final_states_cotangent):
    """What `Implementation.row_states` says, of the reference and its gradient."""

    def results(begin):
        return FAMILY.reference(dataclasses.replace(record, initial_state=begin))[0]

    (output, final), pull = jax.vjp(results, jnp.zeros_like(states(record)))
    if output_cotangent is None:
        return final
    last = jnp.zeros_like(final) if final_states_cotangent is None else final_states_cotangent
    return pull((output_cotangent.astype(output.dtype), last.astype(final.dtype)))[0]


@pytest.fixture
def subjects_with(monkeypatch):
    """Returns the subjects of an operation whose implementation has a given function for states of rows."""

    def make(op, function):
        known, load = registry().implementations[op], grad.load_object
        xla = next(i for i in known if i.name == "xla")
        stand_in = dataclasses.replace(xla, name="stand_in", row_states=STAND_IN)
        monkeypatch.setitem(registry().implementations, op, (*known, stand_in))
        monkeypatch.setattr(grad, "load_object", lambda path: function if path == STAND_IN else load(path))
        found = Selection((op,), ("stand_in",), "ci").of("ejk_row_states")
        return (subject for subject in found if not row_states_refused(subject))

    return make


@pytest.mark.parametrize("op", ["lightning_attention", "gated_delta_rule"])
def test_states_of_rows_are_compared_with_the_reference(op, subjects_with):
    """Those without a delta rule are states and gradients; with one, gradients with columns of the factor."""
    row_states.check_row_states(next(subjects_with(op, states_by_the_reference)))


@pytest.mark.parametrize(
    ("op", "wrong"), [("lightning_attention", "added state"), ("gated_delta_rule", "entering state")]
)
def test_wrong_states_of_rows_are_found(op, wrong, subjects_with):
    def double(record, output_cotangent, final_states_cotangent):
        found = states_by_the_reference(record, output_cotangent, final_states_cotangent)
        return found * 2 if (output_cotangent is None) == (wrong == "added state") else found

    with pytest.raises(AssertionError, match=f"row_states, .*{wrong}"):
        row_states.check_row_states(next(subjects_with(op, double)))


def test_calls_without_states_of_rows_are_left_out(subjects_with):
    assert not any(subjects_with("lightning_attention", lambda *_: None))
