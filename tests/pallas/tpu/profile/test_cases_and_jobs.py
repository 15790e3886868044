"""What can be profiled, and what is said where it cannot."""

import importlib.util
from pathlib import Path

import profiled_kernels
import pytest

from ejkernel_pallas.tpu.profile import Case, profile, profile_many
from ejkernel_pallas.tpu.profile.cases import find_function, function_path

BUILDERS = Path(profiled_kernels.__file__)


def test_functions_are_found_in_modules_and_files():
    assert find_function("profiled_kernels:softmax") is profiled_kernels.softmax
    assert find_function(f"{BUILDERS}:softmax").__name__ == "softmax"
    assert find_function("pathlib:Path.exists") is Path.exists
    assert function_path(profiled_kernels.softmax) == "profiled_kernels:softmax"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("softmax", "got 'softmax', wants 'module:function'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("profiled_kernels:nothing", "no attribute 'nothing'"),
        ("nowhere.py:f", "nowhere.py"),
    ],
)
def test_missing_functions_are_named_in_the_error(path, message):
    with pytest.raises(ValueError, match=message):
        find_function(path)


def test_functions_outside_modules_are_refused():
    with pytest.raises(ValueError, match="wants a function of a module"):
        profile(lambda x: x)


def test_unknown_chips_are_refused():
    with pytest.raises(ValueError, match="got 'v4', wants one of v5e, v5p, v6e, v7x"):
        profile_many([], target="v4")


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else find(name))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ejkernel-pallas\[aot\]'"):
        profile_many([Case(label="x", build="profiled_kernels:softmax")])


def test_operands_are_read_from_hbm_unless_vmem_is_allowed():
    case = Case(label="x", build="profiled_kernels:matmul", kwargs={"m": 256}, compiler_options={"xla_a": 1})
    assert case.options() == {"xla_msa_enable": False, "xla_a": 1}
    assert Case(label="x", build="y:z", operands_may_stay_in_vmem=True).options() == {}
    assert case.workload().flops == 2 * 256 * 512 * 256
