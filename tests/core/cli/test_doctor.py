"""`ejkernel doctor`."""

import jax
import pytest

from ejkernel import __version__

TOOLCHAIN = """
import dataclasses
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS

@hookimpl
def ejkernel_implementations():
    requires = dataclasses.replace(
        IMPLEMENTATIONS[0].requires, devices=frozenset({"tpu"}), modules=("json", "no_such_compiler")
    )
    return [dataclasses.replace(IMPLEMENTATIONS[0], name="elsewhere", requires=requires)]
"""


def row(output: str, start: str) -> str:
    return next(line for line in output.splitlines() if line.strip().startswith(start))


def test_doctor_prints_versions_devices_backends_operations_and_store(run, store):
    output = run("doctor").output
    assert __version__ in row(output, "ejkernel ")
    assert jax.__version__ in row(output, "jax ")
    assert row(output, f"{len(jax.devices())} ").split()[1:3] == ["cpu", "cpu"]
    assert "ejkernel-xla" in row(output, "xla ")
    assert "none needed" in row(output, "gru ")
    assert f"Store {store}: 0 entries, writable" in output


def test_implementations_are_counted_for_each_backend(run, install):
    install("credited_backend", TOOLCHAIN)
    assert row(run("doctor").output, "credited_backend ").split()[1:4] == ["credited_backend", "1.0", "1"]


def test_toolchains_and_devices_that_are_missing_are_named(run, install):
    install("toolchain_backend", TOOLCHAIN)
    line = next(line for line in run("doctor").output.splitlines() if " elsewhere " in line)
    assert "tpu (not here)" in line
    assert "json, no_such_compiler (missing)" in line


def test_a_plugin_that_failed_is_reported_and_fatal_only_when_asked(run, install):
    install("broken_backend", "raise RuntimeError('the driver is on strike')")
    assert "RuntimeError: the driver is on strike" in row(run("doctor").output, "broken_backend ")
    assert "the driver is on strike" in run("doctor", "--strict", status=1).output


def test_strict_exits_with_0_where_there_is_no_problem(run):
    run("doctor", "--strict")


def test_a_machine_without_devices_is_reported(run, monkeypatch):
    def nothing() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", nothing)
    assert "JAX found no device: Unable to initialize backend 'tpu'" in run("doctor").output
    run("doctor", "--strict", status=1)
    output = run("explain", "flash_attention", "--shape", "1,8,1,8", status=1).output
    assert output.splitlines() == ["Error: JAX found no device: Unable to initialize backend 'tpu'"]


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_store_that_cannot_be_written_is_reported(run, store, monkeypatch, content):
    store.parent.mkdir()
    if content is not None:
        store.write_text('{"entries": {}}')
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "read-only" in run("doctor").output
