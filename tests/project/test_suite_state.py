"""What keeps tests apart that share a process: tests/support/suite/state.py."""

import os
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from suite.state import SharedStateGuard

from ejkernel.ops import plugins
from ejkernel.ops.call import default_chain


@pytest.fixture
def guard():
    guard = SharedStateGuard()
    guard.begin_test()
    yield guard
    guard.end_test(is_last_of_file=True)


def test_a_registry_that_a_test_loads_anew_is_replaced_by_the_one_before():
    guard, before = SharedStateGuard(), plugins.registry()
    guard.begin_test()
    plugins.reload()
    assert plugins.registry() is not before
    guard.end_test(is_last_of_file=False)
    assert plugins.registry() is before


def test_variables_and_options_are_restored_when_the_file_ends(guard, monkeypatch):
    monkeypatch.setenv("EJKERNEL_LEFT_BY_A_TEST", "1")
    flags, precision = os.environ.get("XLA_FLAGS"), jax.config.jax_default_matmul_precision
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    jax.config.update("jax_default_matmul_precision", "highest")
    guard.end_test(is_last_of_file=False)
    assert os.environ["EJKERNEL_LEFT_BY_A_TEST"] == "1"
    guard.end_test(is_last_of_file=True)
    assert "EJKERNEL_LEFT_BY_A_TEST" not in os.environ
    assert os.environ.get("XLA_FLAGS") == flags
    assert jax.config.jax_default_matmul_precision == precision


def test_the_path_of_modules_the_folder_and_the_default_chain_are_restored(guard, monkeypatch, tmp_path):
    path, folder, chain = list(sys.path), Path.cwd(), default_chain()
    sys.path.insert(0, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    guard.end_test(is_last_of_file=True)
    assert sys.path == path
    assert Path.cwd() == folder
    assert default_chain() is not chain


def test_each_test_draws_what_the_import_of_its_module_left():
    guard, module = SharedStateGuard(), types.ModuleType("test_of_draws")
    module.RANDOM = np.random.default_rng(0)
    module.RANDOM.random()  # drawn by the import
    draws = []
    for _ in range(2):
        guard.begin_test(module)
        draws.append(module.RANDOM.random(3).tolist())
        guard.end_test(is_last_of_file=False)
    assert draws[0] == draws[1] == np.random.default_rng(0).random(4)[1:].tolist()
