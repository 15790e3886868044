"""The time that processes of a job wait for process 0."""

import pytest

from ejkernel.ops.config import agreement


@pytest.mark.parametrize(("text", "seconds"), [("", 600), ("0.5", 0.5), (" 20 ", 20)])
def test_the_environment_sets_the_time_to_wait(monkeypatch, text, seconds):
    monkeypatch.setenv(agreement.TIMEOUT_VARIABLE, text)
    assert agreement._timeout_s() == seconds


@pytest.mark.parametrize("text", ["ten", "0", "-1", "nan", "inf"])
def test_a_value_that_is_no_time_is_an_error_that_names_the_variable(monkeypatch, text):
    monkeypatch.setenv(agreement.TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=f"EJKERNEL_AGREEMENT_TIMEOUT_S: got '{text}', wants a positive number"):
        agreement._timeout_s()
