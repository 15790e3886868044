"""The page "Coming from upstream": every public name of the earlier library is here, or has a reason."""

import fnmatch
import importlib

import pytest

import ejkernel
from ejkernel.compat.differences import differences, upstream_surface
from ejkernel.compat.paths import OLD_NAMES
from ejkernel.compat.surface import describe
from ejkernel.compat.upstream import coming_from_upstream_page, handwritten_tables, unexplained_differences

TABLES = handwritten_tables()


def test_every_missing_name_and_argument_has_a_reason():
    assert unexplained_differences() == {}


def test_every_reason_belongs_to_a_difference():
    found = differences()
    for pattern in TABLES["reason"]:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in found), pattern


def test_the_functions_that_a_model_library_calls_are_here_with_all_their_arguments():
    operations = {n for n in upstream_surface()["ejkernel.modules"] if n.islower()}
    found = [n.rpartition(".")[2] for n in differences() if n.startswith("ejkernel.modules.") and n.count(".") == 2]
    assert operations
    assert not operations & set(found)


def test_the_page_has_every_reason_and_every_difference():
    page = coming_from_upstream_page()
    for reason in TABLES["reason"].values():
        assert f"| {reason} |" in page
    for entry in TABLES["difference"]:
        assert set(entry) == {"topic", "upstream", "here"}
        assert f"| {entry['topic']} | {entry['upstream']} | {entry['here']} |" in page
    assert "override-dependencies" in page


@pytest.mark.parametrize("module", OLD_NAMES)
def test_old_names_in_newer_modules(module):
    found = importlib.import_module(module)
    for name, home in OLD_NAMES[module].items():
        assert getattr(found, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = found.nothing


def test_old_modules_are_attributes_too():
    assert ejkernel.kernels.Platform is ejkernel.Platform
    assert ejkernel.benchmarks.Benchmark


def test_a_signature_tells_how_arguments_are_given():
    described = describe(["ejkernel.utils"], lambda _: ["make_mesh", "next_power_of_2", "numeric_gen"])[
        "ejkernel.utils"
    ]
    assert described["next_power_of_2"] == "x"
    assert described["make_mesh"] == "axis_dims|mesh_axis axis_names devices"
    assert described["numeric_gen"] == "shape* dtype= method= seed= key="
