"""`ejkernel tune --target`: with a worker that compiles nothing, and with libtpu."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from ejkernel.cli import main
from ejkernel.modules.operations.grouped_matmul import OP
from ejkernel.ops.call import decide, default_chain
from ejkernel.ops.config.chain import ConfigSelectorChain
from ejkernel.ops.config.persistent import DIRECTORY_VARIABLE, PersistentCache
from ejkernel.ops.device import target_device
from ejkernel.ops.execution.target import make_with_abstract_floats
from ejkernel_pallas.tpu.profile import jobs
from ejkernel_pallas.tpu.profile.tuning import targets

SHAPES = ("--shape", "lhs=4096,4096", "--shape", "rhs=4,4096,4096", "--shape", "group_sizes=4", "--dtype", "bfloat16")
SMALL = ("--shape", "lhs=256,128", "--shape", "rhs=2,128,128", "--shape", "group_sizes=2")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    default_chain.cache_clear()

    def invoke(*arguments, status=0):
        result = CliRunner().invoke(main, ["tune", "grouped_matmul", *arguments])
        assert result.exit_code == status, result.output
        return result.output

    yield invoke
    default_chain.cache_clear()


@pytest.fixture
def faked(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find("json" if name == "libtpu" else name))
    monkeypatch.setattr(jobs, "_WORKER_MODULE", "fake_tpu_worker")


def test_predictions_are_exported_under_the_device_kind(run, faked, tmp_path):
    output = run(*SHAPES, "--target", "v6e", "--export", str(tmp_path / "tuned"))
    assert "grouped_matmul, forward, mosaic_tpu predicted for TPU v6 lite" in output
    assert "grouped_matmul, backward, mosaic_tpu predicted for TPU v6 lite" in output
    assert "no room" in output
    assert "ended without a report" in output
    table = json.loads((tmp_path / "tuned" / "TPU_v6_lite" / "grouped_matmul.json").read_text())["entries"]
    assert {(entry["config"]["block_n"], entry["predicted"]) for entry in table.values()} == {(512, True)}
    store = PersistentCache(tmp_path)
    assert not store.entries()
    assert [key.split(" | ")[3] for key in store.predicted.entries()] == ["TPU v6 lite"] * 2
    args = OP.arguments(**{name: _shape(text) for name, text in _given().items()})
    with target_device(targets()["v6e"].device):
        choice = decide(OP, args, chain=ConfigSelectorChain(persistent=store)).forward
    assert (choice.implementation.name, choice.tier, choice.config.block_n) == ("mosaic_tpu", "heuristics", 512)


def _given():
    return dict(text.split("=") for text in SHAPES[1:6:2])


def _shape(text):
    import jax

    sizes = tuple(map(int, text.split(",")))
    return jax.ShapeDtypeStruct(sizes, "int32" if len(sizes) == 1 else "bfloat16")


def test_schedules_with_unknown_values_are_not_predicted(run, faked):
    small = ("--shape", "lhs=1024,4096", "--shape", "rhs=4,4096,4096", "--shape", "group_sizes=4")
    output = run(*small, "--target", "v5e", "--direction", "forward")
    assert "depends on values that are not known: operand 0" in output


def test_tuning_an_unsupported_pass_is_an_error_with_reasons(run, faked):
    output = run(*SMALL, "--target", "v5p", "--platform", "triton", status=1)
    assert "platform='triton' was asked for" in output
    assert "no implementation supports the forward pass" in output


def test_unknown_tuning_targets_are_refused(run):
    assert "--target: got 'v4', there are v5e, v5p, v6e, v7x" in run(*SMALL, "--target", "v4", status=2)


def test_repeat_is_refused_with_a_predicted_target(run):
    assert "--repeat has no effect with --target" in run(*SMALL, "--target", "v5e", "--repeat", "3", status=2)


def test_without_libtpu_the_error_says_what_to_install(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else find(name))
    assert "pip install 'ejkernel-pallas[aot]'" in run(*SMALL, "--target", "v5e", status=1)


def test_large_arrays_are_described_by_shape_only():
    import jax
    import jax.numpy as jnp

    made = make_with_abstract_floats(lambda: {"large": jnp.zeros((2**20, 2**20)), "lengths": jnp.arange(3)})
    assert made["large"] == jax.ShapeDtypeStruct((2**20, 2**20), "float32")
    assert made["lengths"].tolist() == [0, 1, 2]


@pytest.mark.needs("libtpu")
def test_candidates_are_predicted_with_libtpu(run, tmp_path):
    output = run(*SMALL, "--target", "v7x", "--export", str(tmp_path))
    assert "predicted for TPU7x" in output
    entries = json.loads((tmp_path / "TPU7x" / "grouped_matmul.json").read_text())["entries"]
    assert all(1e-7 < entry["seconds"] < 1e-4 for entry in entries.values())
    output = run(*SMALL, "--target", "v7x", "--platform", "xla", "--direction", "forward", status=1)
    assert "it has no TPU kernels, and only these can be predicted" in output
