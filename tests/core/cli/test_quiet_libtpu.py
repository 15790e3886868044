"""libtpu that is installed only for its compiler: no command lets it print, and its compiler can still be imported."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType

import jax
import pytest

from ejkernel.cli import devices


@pytest.fixture
def libtpu(monkeypatch):
    """A module in the place of libtpu, and what JAX would see of it at each look for devices."""
    module, seen = ModuleType("libtpu"), []
    module.__spec__ = importlib.util.spec_from_loader("libtpu", loader=None)
    monkeypatch.setitem(sys.modules, "libtpu", module)
    monkeypatch.setenv(devices.LIBTPU_PATH_VARIABLE, "/somewhere/libtpu.so")
    real = jax.devices

    def looking(*args):
        try:
            importlib.import_module("libtpu")
            seen.append(os.environ.get(devices.LIBTPU_PATH_VARIABLE, "imported"))
        except ImportError:
            seen.append(os.environ.get(devices.LIBTPU_PATH_VARIABLE, "hidden"))
        return real(*args)

    monkeypatch.setattr(jax, "devices", looking)
    return module, seen


@pytest.mark.usefixtures("traced_cases")
@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("ops", "--json"),
        ("explain", "mean_pooling", "--shape", "1,16,8"),
        ("tune", "mean_pooling", "--shape", "1,16,8", "--repeat", "1", "--direction", "forward"),
        ("bench", "mean_pooling", "--shape", "1,16,8", "--repeat", "1"),
    ],
    ids=lambda command: command[0],
)
def test_jax_does_not_see_libtpu_on_its_first_look_for_devices(run, libtpu, monkeypatch, command):
    monkeypatch.setattr(devices, "_may_have_tpu", lambda: False)
    module, seen = libtpu
    run(*command)
    assert seen[0] == "hidden"
    assert sys.modules["libtpu"] is module
    assert os.environ[devices.LIBTPU_PATH_VARIABLE] == "/somewhere/libtpu.so"
    assert importlib.util.find_spec("libtpu") is not None


def test_a_machine_with_a_tpu_sees_it(libtpu, monkeypatch):
    monkeypatch.setattr(devices, "_may_have_tpu", lambda: True)
    devices.find_devices()
    assert libtpu[1] == ["/somewhere/libtpu.so"]


def test_libtpu_that_was_not_imported_stays_so(monkeypatch):
    monkeypatch.setattr(devices, "_may_have_tpu", lambda: False)
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    monkeypatch.delenv(devices.LIBTPU_PATH_VARIABLE, raising=False)
    assert devices.find_devices() == jax.devices()
    assert "libtpu" not in sys.modules
    assert devices.LIBTPU_PATH_VARIABLE not in os.environ


def test_a_platform_that_the_user_names_is_not_hidden(monkeypatch):
    monkeypatch.setattr(devices, "DEVICE_NODES", ())
    for platforms, expected in (("tpu,cpu", True), ("cpu", False)):
        monkeypatch.setattr(devices.jax, "config", type("Config", (), {"jax_platforms": platforms}))
        assert devices._may_have_tpu() is expected
