"""What a plugin declares is checked without a call: names that do not exist are found."""

import dataclasses

import pytest

from ejkernel.ops.declarations import declaration_errors, object_path_error, wrong_declarations
from ejkernel.ops.plugins import registry
from ejkernel_xla.segment_pooling import IMPLEMENTATIONS

(GOOD,) = IMPLEMENTATIONS
FAMILY = registry().ops["mean_pooling"].family


def with_requires(**changes):
    return dataclasses.replace(GOOD, requires=dataclasses.replace(GOOD.requires, **changes))


@pytest.mark.parametrize(
    ("implementation", "sentence"),
    [
        (
            with_requires(handles=frozenset({"lengthz"})),
            "requires.handles: there is no 'lengthz'; did you mean 'lengths'",
        ),
        (with_requires(handles=frozenset({"zzz"})), "requires.handles: there is no 'zzz'; there are "),
        (with_requires(dtypes=frozenset({"fp32"})), "requires.dtypes: there is no dtype 'fp32'"),
        (with_requires(dtypes=frozenset({"f4"})), "requires.dtypes: got 'f4', wants 'float32'"),
        (with_requires(devices=frozenset({"nvida"})), "requires.devices: there is no 'nvida'; did you mean 'nvidia'?"),
        (with_requires(modules=(">=3",)), "requires.modules: got '>=3', wants a module"),
        (with_requires(modules=("numpy==banana",)), "requires.modules: Invalid specifier"),
        (
            dataclasses.replace(GOOD, gradients=frozenset({"value"})),
            "gradients: there is no 'value'; did you mean 'value",
        ),
        (
            dataclasses.replace(GOOD, forward="ejkernel_xla.nowhere:forward"),
            "there is no module 'ejkernel_xla.nowhere'",
        ),
        (dataclasses.replace(GOOD, forward="nowhere.at.all:forward"), "there is no module 'nowhere'"),
        (
            dataclasses.replace(GOOD, forward="ejkernel_xla.sizes:forwards"),
            "module 'ejkernel_xla.sizes' has no 'forwards'",
        ),
        (dataclasses.replace(GOOD, forward="ejkernel_xla.sizes"), "wants 'module:attribute'"),
        (dataclasses.replace(GOOD, backward="ejkernel_xla.nowhere:x"), "backward: 'ejkernel_xla.nowhere:x'"),
        (dataclasses.replace(GOOD, cases="ejkernel_xla.nowhere:x"), "cases: 'ejkernel_xla.nowhere:x'"),
        (dataclasses.replace(GOOD, package="nowhere"), "package: there is no package 'nowhere'"),
        (dataclasses.replace(GOOD, package="nowhere.at.all"), "package: there is no package 'nowhere.at.all'"),
    ],
)
def test_declaration_errors_report_names_that_do_not_exist(implementation, sentence):
    (found,) = declaration_errors(implementation, FAMILY)
    assert sentence in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: dataclasses.replace(GOOD, name=7), "name of implementation 7: got 7, wants a str"),
        (lambda: dataclasses.replace(GOOD, platform=None), "platform of implementation .*: got None, wants a str"),
        (
            lambda: dataclasses.replace(GOOD, only=["gru"]),
            "only of .*: got .*, wants a frozenset of names or None",
        ),
        (lambda: dataclasses.replace(GOOD, priority="high"), "priority of .*: got 'high', wants int or a function"),
        (lambda: dataclasses.replace(GOOD, priority=True), "priority of .*: got True, wants int or a function"),
        (
            lambda: dataclasses.replace(GOOD, priority_reason="fast"),
            "priority_reason of .*: got 'fast', wants a function",
        ),
        (
            lambda: dataclasses.replace(GOOD, invariance_limits=None),
            "invariance_limits of .*: got None, wants a function",
        ),
        (lambda: dataclasses.replace(GOOD, requires=None), "requires of .*: got None, wants Requires"),
        (lambda: dataclasses.replace(GOOD, config=None), "config of .*: got None, wants ConfigSpace"),
        (lambda: with_requires(devices="cpu"), "devices of Requires: got 'cpu', wants a frozenset of names"),
        (lambda: with_requires(dtypes=frozenset({None})), "dtypes of Requires: got .* wants a frozenset of names"),
        (lambda: with_requires(modules="jax"), "modules of Requires: got 'jax', wants a tuple of str"),
        (lambda: with_requires(extra=()), r"extra of Requires: got \(\), wants a function"),
    ],
)
def test_a_declaration_of_a_wrong_type_cannot_be_created(change, message):
    with pytest.raises(ValueError, match=message):
        change()


def test_declaration_errors_cover_backward_requires():
    wrong = dataclasses.replace(GOOD, backward_requires=dataclasses.replace(GOOD.requires, dtypes=frozenset({"fp16"})))
    (found,) = declaration_errors(wrong, FAMILY)
    assert "backward_requires.dtypes: there is no dtype 'fp16'" in found


def test_built_in_implementations_have_no_declaration_errors():
    assert wrong_declarations(registry()) == {}


def test_names_defined_by_a_module_are_read_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "declared_source.py").write_text(
        "import os.path as p\nA, (B, *C) = 1, (2, 3)\nD: int = 4\nif A:\n    def e(): pass\nelse:\n    class F: pass\n"
        "try:\n    import no_such_toolchain\nexcept ImportError:\n    G = None\nraise SystemExit\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("p", "A", "B", "C", "D", "e", "F", "G", "no_such_toolchain"):
        assert object_path_error(f"declared_source:{name}") is None
    assert "has no 'H'" in object_path_error("declared_source:H")


def test_modules_with_star_imports_or_missing_toolchains_pass_the_name_check(tmp_path, monkeypatch):
    (tmp_path / "starred_source.py").write_text("from os import *\n")
    (tmp_path / "needs_toolchain").mkdir()
    (tmp_path / "needs_toolchain" / "__init__.py").write_text("import no_such_toolchain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert object_path_error("starred_source:anything") is None
    assert object_path_error("needs_toolchain.kernels:anything") is None
    assert object_path_error("math:cos") is None


def test_fields_that_a_block_fixes_are_fields_of_the_configuration():
    with pytest.raises(ValueError, match="fixed_if_invariant: TokenTiles has no field chunk"):
        dataclasses.replace(GOOD.config, fixed_if_invariant=("chunk",))
