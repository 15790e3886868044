"""Backends from outside: what an honest one gets, and what the conformance suite does to the others.

Runs where `tests/third_party_plugin` and `tests/third_party_liar` are installed, which `nox -s third_party` sees to.
"""

import functools
import importlib.metadata
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.ops import NoImplementationError, registry
from ejkernel_conformance.design import IN_ROTATION

OUTSIDE = ("ejkernel-acme", "ejkernel-liar")
BROKEN = "plugin liar_broken (ejkernel-liar 0.6.6) not loaded: RuntimeError: libbroken.so"

# The suite compiles hundreds of functions in a process of its own.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(autouse=True)
def outside() -> None:
    """Fails where the distributions are not installed."""
    there = {distribution.name for distribution in importlib.metadata.distributions()}
    if missing := ", ".join(name for name in OUTSIDE if name not in there):
        pytest.fail(f"not installed: {missing}; nox -s third_party installs it")


@functools.cache
def suite(*options: str, module: str = "ejkernel_conformance") -> dict[str, str]:
    """Runs the conformance suite as its users do; test id -> passed or failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--pyargs", module, *options, "-q", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert report.exists(), done.stdout + done.stderr
        cases = ET.parse(report).getroot().iter("testcase")
        return {case.attrib["name"]: _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    assert "skipped" not in kinds
    return "failed" if kinds & {"failure", "error"} else "passed"


def _with(results: dict[str, str], outcome: str) -> set[str]:
    return {name for name, found in results.items() if found == outcome}


def _shapes(keys: int = 16, dtype: object = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    lengths = (16, keys, keys)
    return tuple(jax.ShapeDtypeStruct((1, length, 2, 8), dtype) for length in lengths)


def _arrays() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, 16, 2, 8)) for key in keys)


# --- discovery and choice --------------------------------------------------------------------------------------------


def test_plugins_are_discovered() -> None:
    found = registry()
    names = [implementation.name for implementation in found.implementations["flash_attention"]]
    # By priority: acme is better than XLA, the liars are worse.
    assert [name for name in names if name in ("acme", "xla", "liar")] == ["acme", "xla", "liar"]
    assert found.versions["flash_attention", "acme"] == "0.3.0"
    assert "acme_scaled_sum" in found.ops


def test_call_within_its_means_goes_to_acme() -> None:
    decision = explain(flash_attention, *_shapes(), causal=True, sliding_window=3)
    assert decision.forward.implementation.name == "acme"
    query, key, value = _arrays()
    got = flash_attention(query, key, value, causal=True, sliding_window=3)
    want = flash_attention(query, key, value, causal=True, sliding_window=3, platform="xla")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_xla_serves_the_backward_pass_that_acme_does_not_have() -> None:
    decision = explain(flash_attention, *_shapes(), causal=True)
    assert decision.backward.implementation.name == "xla"
    verdicts = {v.implementation.name: v.reasons for v in decision.backward.verdicts}
    assert verdicts["acme"] == ("has no backward",)

    def loss(arrays: tuple[jax.Array, ...], platform: str) -> jax.Array:
        return jnp.sum(jnp.sin(flash_attention(*arrays, causal=True, platform=platform)))

    mixed, plain = (jax.grad(loss)(_arrays(), platform) for platform in ("auto", "xla"))
    for got, want in zip(mixed, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "options", "sentence"),
    [
        (_shapes(), {"logits_soft_cap": 2.0}, "logits_soft_cap is not handled"),
        (_shapes(dtype=jnp.float16), {}, "dtype float16 is not among bfloat16, float32"),
        (_shapes(keys=5000), {}, "holds whole rows of scores, 5000 keys are more than 4096"),
    ],
    ids=["argument", "dtype", "own words"],
)
def test_refusals_are_explained(shapes: tuple[jax.ShapeDtypeStruct, ...], options: dict, sentence: str) -> None:
    choice = explain(flash_attention, *shapes, **options).forward
    assert choice.implementation.name == "xla"
    assert {v.implementation.name: v.reasons for v in choice.verdicts}["acme"] == (sentence,)
    assert sentence in str(choice)


def test_platform_of_acme_is_not_replaced() -> None:
    with pytest.raises(NoImplementationError, match="logits_soft_cap is not handled"):
        flash_attention(*_arrays(), logits_soft_cap=2.0, platform="acme")


def test_broken_plugin_is_reported_and_not_fatal() -> None:
    assert BROKEN in str(explain(flash_attention, *_shapes()))
    assert flash_attention(*_arrays()).shape == (1, 16, 2, 8)


def test_operation_from_outside() -> None:
    from ejkernel_acme.scaled_sum import scaled_sum

    x, weights = jnp.arange(12.0).reshape(3, 4), jnp.array([1.0, 0.0, 2.0, -1.0])
    np.testing.assert_allclose(scaled_sum(x, weights, scale=0.5), 0.5 * np.asarray(x) @ np.asarray(weights))
    gradients = jax.grad(lambda x, weights: scaled_sum(x, weights, scale=0.5).sum(), argnums=(0, 1))(x, weights)
    np.testing.assert_allclose(gradients[0], np.broadcast_to(0.5 * weights, x.shape))
    np.testing.assert_allclose(gradients[1], 0.5 * x.sum(axis=0))
    assert explain(scaled_sum, x).forward.implementation.name == "acme"


# --- the suite -------------------------------------------------------------------------------------------------------


def test_suite_passes_the_honest_backend() -> None:
    results = suite("--ejk-impl", "acme", "--ejk-cover=first")
    assert not _with(results, "failed")
    passed = _with(results, "passed")
    for test in ("test_value", "test_gradients"):
        assert any(name.startswith(f"{test}[flash_attention-acme-") for name in passed), test
    for test in IN_ROTATION:  # in the first design, each on any operation
        assert any(name.startswith(f"{test}[") and "-acme-" in name for name in passed), test
    assert {"test_handles[scaled sum-acme-scale]", "test_candidates[acme_scaled_sum-acme-forward]"} <= passed
    assert "test_refusals[tiled_attention-acme]" in passed
    assert "test_value[flash_attention-acme-bias]" not in results  # it is refused


def test_suite_catches_the_liar_on_windows_and_nothing_else() -> None:
    """The covering design is enough: it has a window in each of these transforms."""
    results = suite("--ejk-impl", "liar", "--ejk-cover=first")
    cases = {case.name for case in registry().ops["flash_attention"].cases if "sliding_window" in case.exercises}
    windows = {name for case in cases for name in results if name.endswith(f"-liar-{case}]")}
    assert _with(results, "failed") <= windows
    for test in ("test_value", "test_gradients", "test_vmap"):
        run = {name for name in windows if name.startswith(f"{test}[")}
        assert run
        assert run <= _with(results, "failed")


def test_suite_catches_what_refuses_everything() -> None:
    results = suite("--ejk-impl", "vacuous")
    assert _with(results, "failed") == {"test_serves_some_case[tiled_attention-vacuous]"}
    assert _with(results, "passed") == {
        "test_refusals[tiled_attention-vacuous]",
        "test_sharding_fields[tiled_attention-vacuous]",
    }


def test_suite_catches_a_claim_that_no_case_shows() -> None:
    results = suite("--ejk-impl", "boaster", module="ejkernel_conformance.test_capabilities")
    assert _with(results, "failed") == {"test_handles[tiled_attention-boaster-telepathy]"}


def test_suite_refuses_to_test_nothing() -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "--ejk-impl", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there is no implementation 'nobody'" in done.stderr
    # The likely reason, if it was meant to be there.
    assert BROKEN in done.stderr
