"""In a job of several processes all run with what process 0 chose; here two real ones, over `jax.distributed`."""

from pathlib import Path
from typing import Any

import pytest
from two_processes import run_two_processes

PROGRAM = Path(__file__).with_name("agreement_process.py")
RULE = 64


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes with stores of their own say after going through all scenarios."""
    stores = tuple([str(tmp_path_factory.mktemp(f"process{rank}"))] for rank in (0, 1))
    found = run_two_processes(PROGRAM, stores, EJKERNEL_AGREEMENT_TIMEOUT_S="60")
    assert [one["processes"] for one in found] == [2, 2]
    return found


def both(said: list[dict[str, Any]], scenario: str) -> list[Any]:
    return [one[scenario] for one in said]


def test_all_processes_use_the_stored_configs_of_process_0(said):
    first, second = both(said, "different_stores")

    assert first["traced"] == second["traced"] == {"forward": [3, RULE], "backward": [5]}
    assert first["kept"] == second["kept"] == 2  # what was measured, and not what a rule chose
    assert first["trail"][-1] == "persistent: user store"
    assert second["trail"][-1] == "agreement: process 0 decided, by its tier persistent"


def test_a_process_whose_own_chain_has_no_config_uses_that_of_process_0(said):
    first, second = both(said, "only_process_0_may_rule")

    assert first["traced"] == second["traced"] == {"forward": [RULE], "backward": [RULE]}


def test_only_process_0_autotunes_and_its_result_replaces_the_agreed_config(said):
    first, second = both(said, "autotuning")

    assert first["traced"] == second["traced"] == {"forward": [RULE, 16], "backward": [RULE, 16]}
    assert first["generation"] == second["generation"]
    assert (first["asked"], first["results"], first["stored"]) == (3, 2, 2)
    assert (second["asked"], second["results"], second["stored"]) == (0, 0, 0)


def test_a_call_on_arrays_that_one_process_does_not_hold_is_left_to_offline_tuning(said):
    first, second = both(said, "arrays_spread_over_processes")

    assert first == second == {"traced": {"forward": [RULE], "backward": []}, "asked": 0, "recorded": 1}


def test_an_error_of_process_0_reaches_all_processes_and_a_retry_succeeds(said):
    first, second = both(said, "failing_at_process_0")

    assert [kind for kind, _ in first["errors"]] == ["NoConfigError"] * 2
    assert [kind for kind, _ in second["errors"]] == ["AgreementError"] * 2
    assert "process 0 could not choose" in second["errors"][0][1]
    assert "NoConfigError: no configuration for toy@1" in second["errors"][0][1]
    assert first["traced"] == second["traced"] == {"forward": [RULE], "backward": [RULE]}


def test_processes_agree_on_configs_per_executor(said):
    first, second = both(said, "two_executors")

    assert first == second == {"traced": [1, RULE]}


def test_a_call_missing_on_process_0_raises_but_explain_does_not_wait(said):
    first, second = both(said, "missing_call")

    assert first == {"errors": [], "tier": "heuristics"}
    assert second["tier"] == "heuristics"
    (error,) = second["errors"]
    assert "process 1 waited 1 s for process 0 to choose a configuration for toy@1 | plain@1.0 | forward" in error
    assert "every process of a job must make the same calls" in error
