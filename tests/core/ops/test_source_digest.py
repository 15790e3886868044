"""`source_digest`: it changes with the code of a kernel and of what that reaches, and with nothing else."""

import dataclasses
import sys

import pytest

from ejkernel.ops import NO_CHOICE, Implementation, Requires
from ejkernel.ops import source_digest as module
from ejkernel.ops.plugins import registry
from ejkernel.ops.source_digest import source_digest

FILES = {
    "__init__.py": "",
    "passes.py": '''"""Docstring."""
from digested import toolkit
from digested.toolkit import LIMIT as limit
from digested.kernels import scan

def forward(record, config):
    """Docstring."""
    return load("digested.lazy:later"), toolkit.helper(record), limit

def load(path):
    return scan.first_kernel, path  # a comment
''',
    "toolkit.py": """
import enum

LIMIT = 3
def helper(x):
    return Kind.one if x else _private()
def _private():
    return 1
class Kind(enum.Enum):
    one = 1
def of_another_kernel():
    return 2
""",
    "lazy.py": "def later(): return 1\ndef unused(): return 1\n",
    "kernels/__init__.py": "",
    "kernels/scan.py": 'def first_kernel(): return registered("handler")\n',
    "../../csrc/scan/scan.cu": (
        '#include "scan/scan.cuh"\n'
        '#include "next_to_it.cuh"\n'
        "// comment\n"
        "int answer() { return 1; }\n"
        "XLA_FFI_DEFINE_HANDLER_SYMBOL(\n    handler, answer)\n"
    ),
    "../../csrc/scan/scan.cuh": '#include "common/ptx.cuh"\n/* comment */ const char* name = "// no comment";\n',
    "../../csrc/scan/next_to_it.cuh": "constexpr int kWarps = 4;\n",
    "../../csrc/common/ptx.cuh": "constexpr int kLanes = 32;\n",
    "../../csrc/common/of_another_handler.cuh": "constexpr int kStages = 2;\n",
}
CACHES = ("_parse_module", "_read_definition", "_is_module", "_cpp_root", "ffi_handlers")


def no_reasons(record):
    return ()


REQUIRES = Requires(devices=frozenset({"nvidia"}), dtypes=frozenset({"float32"}), handles=frozenset({"causal"}))
IMPLEMENTATION = Implementation(
    family="tiled_attention",
    name="digested",
    platform="digested",
    forward="digested.passes:forward",
    requires=REQUIRES,
    config=NO_CHOICE,
)


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """A function that gives the digest of the package's files with some replaced."""
    package = tmp_path / "src/digested"
    monkeypatch.syspath_prepend(str(package.parent))

    def of(implementation=IMPLEMENTATION, **replaced):
        for name, text in FILES.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            old, new = replaced.get(path.name.replace(".", "_"), ("", ""))
            assert old in text
            path.write_text(text.replace(old, new) if old else text)
        for cached in CACHES:
            getattr(module, cached).cache_clear()
        return source_digest(implementation)

    yield of
    for name in [name for name in sys.modules if name.partition(".")[0] == "digested"]:
        del sys.modules[name]
    for cached in CACHES:
        getattr(module, cached).cache_clear()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("passes_py", '"""Docstring."""', ""),
        ("passes_py", '    """Docstring."""\n', ""),
        ("passes_py", "# a comment", ""),
        ("passes_py", "(record, config)", "(record,\n      config)"),
        ("toolkit_py", "return 2", "return 3"),
        ("toolkit_py", "import enum\n", 'import enum\n__all__ = ["helper"]\n'),
        ("lazy_py", "def unused(): return 1", "def unused(): return 2"),
        ("scan_cu", "// comment", "// other"),
        ("scan_cu", "int answer()", "int  answer()"),
        ("scan_cuh", "/* comment */", ""),
        ("of_another_handler_cuh", "kStages = 2", "kStages = 3"),
    ],
)
def test_source_digest_ignores_comments_and_other_kernels(digest, file, old, new):
    assert digest() == digest(**{file: (old, new)})


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("passes_py", "toolkit.helper(record)", "toolkit.helper(1)"),
        ("toolkit_py", "LIMIT = 3", "LIMIT = 4"),
        ("toolkit_py", "return 1\n", "return 5\n"),
        ("toolkit_py", "one = 1", "one = 2"),
        ("toolkit_py", "import enum\n", "import enum\nregister()\n"),
        ("lazy_py", "def later(): return 1", "def later(): return 2"),
        ("scan_py", "first_kernel(): return", "first_kernel(): yield"),
        ("scan_cu", "return 1;", "return 2;"),
        ("scan_cuh", "// no comment", "// another"),
        ("next_to_it_cuh", "kWarps = 4", "kWarps = 8"),
        ("ptx_cuh", "kLanes = 32", "kLanes = 16"),
    ],
)
def test_source_digest_covers_all_code_that_a_kernel_reaches(digest, file, old, new):
    assert digest() != digest(**{file: (old, new)})


@pytest.mark.parametrize("macro", ["XLA_FFI_DEFINE_HANDLER_SYMBOL", "EJKERNEL_FFI_HANDLER"])
def test_source_digest_covers_ffi_handlers_of_either_macro(digest, macro):
    old = "return 1; }\nXLA_FFI_DEFINE_HANDLER_SYMBOL("
    first, second = (digest(scan_cu=(old, f"return {n}; }}\n{macro}(")) for n in (1, 2))
    assert first != second


def test_source_digest_covers_the_declared_requirements(digest):
    wider = dataclasses.replace(REQUIRES, handles=frozenset({"causal", "bias"}))
    assert digest() != digest(dataclasses.replace(IMPLEMENTATION, requires=wider))


def test_source_digest_finds_the_sources_of_every_kernel():
    found = {i.name: i for listed in registry().implementations.values() for i in listed if i.platform != "xla"}
    for implementation in found.values():
        closure = module._SourceClosure(implementation.forward.partition(".")[0])
        closure.add(*implementation.forward.split(":"))
        assert len(closure.texts) > 3, implementation.name
        if implementation.platform == "cuda" and implementation.name != "cudnn":
            assert any(path.suffix == ".cu" for path in closure.sources), implementation.name
