"""Evidence in dispatch: what a chip has confirmed with the toolchain that runs comes first, and `explain` says why."""

import sys

import jax
import jax.numpy as jnp
import pytest
import toy

from ejkernel.modules.base import detect_platform
from ejkernel.ops import DeviceInfo, evidence, explain, model, target_device
from ejkernel.ops.evidence import (
    Confirmation,
    EvidenceFile,
    EvidenceWarning,
    FamilyEvidence,
    Tally,
    not_confirmed_reason,
)

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
H100 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H100 80GB HBM3", compute_capability=9.0)
A100 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100-SXM4-40GB", compute_capability=8.0)
CPU = DeviceInfo(platform="cpu")
JAX = ".".join(jax.__version__.split(".")[:2])
PASSED = Tally(passed=10, refused=2)


def confirmation(tally=PASSED, *, device=H200, jax=f"{JAX}.77", at="2026-11-26", op="toy", **about):
    family = FamilyEvidence(digest="0", operations={op: tally}, **about)
    return Confirmation(device=device.kind, versions={"jax": jax, "python": "3.12"}, at=at, families={"toy": family})


def forget():
    caches = (
        evidence.shipped,
        evidence._unconfirmed_reason,
        evidence._confirmed_text,
        evidence._are_unconfirmed_kernels_allowed,
        model._shipped_folder,
    )
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def ship(tmp_path, monkeypatch, use):
    """Makes the confirmations given all that the backend `fast` ships; it comes before XLA by priority."""
    monkeypatch.delenv(evidence.UNCONFIRMED_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shipping/evidence").mkdir(parents=True)
    (tmp_path / "shipping/__init__.py").touch()
    devices = frozenset({"cpu", "nvidia"})
    fast = {"platform": "fast", "priority": 10, "package": "shipping", "devices": devices}
    use(toy.plugin(toy.implementation("fast", **fast), toy.implementation("xla", devices=devices)))

    def ship(*confirmations, chip="sm_90", name="fast", change=lambda text: text):
        file = EvidenceFile(implementation=name, chip=chip, confirmations=confirmations)
        path = tmp_path / "shipping/evidence" / chip / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change(evidence.encode(file)))
        forget()

    forget()
    yield ship
    forget()
    sys.modules.pop("shipping", None)


def choice(device=H200, **options):
    with target_device(device):
        return explain("toy", jnp.ones((4, 8)), **options).forward


def sentence(device=H200):
    """Why the fast one comes last; XLA is chosen then."""
    found = choice(device)
    assert [v.implementation.name for v in found.verdicts] == ["xla", "fast"]
    assert found.implementation.name == "xla"
    assert found.verdicts[1].unconfirmed_reason in str(found)
    return found.verdicts[1].unconfirmed_reason


def confirmed(device=H200):
    found = choice(device)
    return found.implementation.name == "fast" and not any(verdict.unconfirmed_reason for verdict in found.verdicts)


def test_a_kernel_without_evidence_ranks_after_xla(ship):
    assert sentence() == "not confirmed on sm_90: no run of its tests there is known"
    with target_device(H200):
        assert detect_platform("toy") == "xla"


def test_a_confirmed_kernel_is_ranked_by_priority(ship):
    ship(confirmation())
    assert confirmed()
    assert f"priority   10  chosen   confirmed on NVIDIA H200 with jax {JAX}.77" in str(choice())
    with target_device(H200):
        assert detect_platform("toy") == "fast"


def test_explicit_platform_chooses_unconfirmed_kernels(ship):
    found = choice(platform="fast")
    assert found.implementation.name == "fast"
    assert "not confirmed on sm_90" in str(found)


def test_only_gpu_kernels_need_evidence(ship):
    assert confirmed(CPU)


def test_evidence_confirms_only_the_chip_it_names(ship):
    ship(confirmation())
    assert confirmed(H100)
    assert sentence(A100) == "not confirmed on sm_80: no run of its tests there is known"


def test_evidence_confirms_only_the_toolchain_it_names(ship):
    ship(confirmation(jax="0.7.3"), confirmation(jax="0.8.1"))
    assert sentence() == f"not confirmed with jax {JAX} on sm_90, but with jax 0.7 and with jax 0.8"
    ship(confirmation(jax="0.7.3"), confirmation(jax=f"{JAX}.99"))
    assert confirmed()


@pytest.mark.parametrize(
    ("shipped", "problem"),
    [
        (confirmation(Tally(passed=9, failed={"test_value[a]": "wrong"})), "1 of 10 tests of toy fail"),
        (confirmation(Tally(passed=9, not_run=("test_value[a]",))), "1 of 10 tests of toy have not run"),
        (confirmation(Tally(refused=9)), "no test of toy has run"),
        (confirmation(op="another"), "no test of toy has run"),
        (confirmation(stale=True), "the sources have changed since"),
        (confirmation(claims=Tally(failed={"test_handles[a]": "no"})), "1 of 1 tests of its claims fail"),
        (confirmation(claims=Tally(not_run=("test_handles[a]",))), "1 of 13 tests of toy have not run"),
    ],
)
def test_evidence_with_failed_or_unrun_tests_does_not_confirm(ship, shipped, problem):
    ship(shipped)
    assert sentence() == f"not confirmed on NVIDIA H200 with jax {JAX}.77: {problem}"


@pytest.mark.parametrize(
    ("kin", "holds"), [(Tally(passed=3), True), (Tally(passed=3, not_run=("test_value[a]",)), False), (Tally(), False)]
)
def test_an_operation_without_served_cases_uses_evidence_of_its_family(kin, holds):
    found = FamilyEvidence(digest="d", operations={"toy": Tally(refused=9), "another": kin})
    assert not_confirmed_reason(found, "toy") == ("" if holds else "no test of toy has run")
    assert not_confirmed_reason(found, "unknown") == "no test of unknown has run"


def test_the_latest_evidence_for_a_device_kind_counts(ship):
    bad = Tally(passed=9, failed={"test_value[a]": "wrong"})
    ship(confirmation(bad, at="2026-11-01"), confirmation(at="2026-11-02", jax=f"{JAX}.78"))
    assert confirmed()
    ship(confirmation(at="2026-11-01"), confirmation(bad, at="2026-11-02", device=H100))
    assert confirmed(H200)
    assert "NVIDIA H100" in sentence(H100)


def test_evidence_edited_by_hand_is_ignored(ship):
    ship(confirmation(Tally(refused=9)), change=lambda text: text.replace(b'"refused": 9', b'"passed": 9'))
    with pytest.warns(EvidenceWarning, match="written by runs, not by hand"):
        assert "no run of its tests" in sentence()


def test_environment_variable_lets_unconfirmed_kernels_be_chosen_by_priority(ship, monkeypatch):
    monkeypatch.setenv(evidence.UNCONFIRMED_VARIABLE, "allow")
    forget()
    assert confirmed()


def test_another_value_of_the_environment_variable_is_an_error(ship, monkeypatch):
    ship(confirmation())
    for value in ("Allow", "1"):
        monkeypatch.setenv(evidence.UNCONFIRMED_VARIABLE, value)
        forget()
        with pytest.raises(ValueError, match=f"EJKERNEL_UNCONFIRMED: got '{value}', wants 'allow', or nothing"):
            confirmed()


def test_evidence_summaries_name_chips_toolchains_and_failures(ship):
    from ejkernel.ops.plugins import registry

    fast, xla = registry().implementations["toy"]
    assert (evidence.evidence_in_words(fast, "toy"), evidence.evidence_in_words(xla, "toy")) == ("none", "none needed")
    bad = Tally(passed=9, failed={"test_value[a]": "wrong"})
    ship(confirmation(jax="0.11.2"), confirmation(bad, jax="0.12.0"), confirmation(jax="0.13.0", stale=True))
    assert evidence.evidence_in_words(fast, "toy") == (
        "sm_90, jax 0.11.2; sm_90, jax 0.12.0 (1 of 10 tests of toy fail); "
        "sm_90, jax 0.13.0 (the sources have changed since)"
    )
    assert [found.stale for found in evidence.evidence_summaries(fast, "toy")] == [False, False, True]
