"""The complete minimal operation and kernels of `docs/extending/`, run through dispatch in a process of their own.

The changes of `add_argument.md` are applied to a copy of the sources, as a reader applies them, and run there.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/extending"

REGISTER_MODULES = """
import importlib, sys
import jax, jax.numpy as jnp
from ejkernel.ops import hookimpl, plugins
from ejkernel.modules import gather_reduce

class Distribution:
    name, version, requires = "acme", "1.0", ()
    metadata = {"Name": "acme"}

class EntryPoint:
    dist = Distribution()
    def __init__(self, name, load): self.name, self.load = name, load

found = list(plugins._entry_points())
modules = [importlib.import_module(name) for name in sys.argv[1:]]
class Operations:
    @hookimpl
    def ejkernel_ops(self): return [module.OP for module in modules if hasattr(module, "OP")]
own = [EntryPoint(module.__name__, lambda module=module: module) for module in modules if not hasattr(module, "OP")]
plugins._entry_points = lambda: [*found, *own, EntryPoint("operations", Operations)]
plugins.reload()
assert not any(plugin.error for plugin in plugins.registry().plugins if plugin.name in sys.argv[1:])
"""

CHECK_OPERATION = """
from acme_operation import OP, cosine_attention, inputs
args = inputs(jax.random.key(0))
output = cosine_attention(args.query, args.key, args.value, causal=True)
assert jnp.abs(output - OP.reference(args)).max() < 1e-5
gradient = jax.grad(lambda query: cosine_attention(query, args.key, args.value, causal=True).sum())(args.query)
assert jnp.isfinite(gradient).all() and gradient.any()
"""

CHECK_KERNEL = """
import ejkernel
rows = jax.random.normal(jax.random.key(0), (6, 40))
indices, inverse = jnp.array([[2, 0], [1, -1]]), jnp.array([[1], [2], [0], [-1], [-1], [-1]])
output = gather_reduce(rows, indices, inverse, platform="acme")
assert jnp.abs(output - jnp.stack([rows[2] + rows[0], rows[1]])).max() < 1e-6
decision = ejkernel.explain(gather_reduce, rows, indices, inverse, platform="acme")
assert decision.forward.implementation.name in ("acme", "acme_triton")
verdicts = {v.implementation.platform: v.reasons for v in ejkernel.explain(
    gather_reduce, rows, indices, inverse, jnp.ones((2, 2))).forward.verdicts}
assert verdicts["acme"] == ("weights is not handled",)
mapped = jax.vmap(lambda x: gather_reduce(x, indices, inverse, platform="acme"))(jnp.stack([rows, 2 * rows]))
assert jnp.abs(mapped[1] - 2 * output).max() < 1e-5
assert (jax.grad(lambda x: gather_reduce(x, indices, inverse).sum())(rows)[:3] == 1).all()
"""


def first_python_block(page: str, heading: str) -> str:
    """The Python example of a section."""
    section = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    return section.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize(
    ("page", "heading", "module", "checks"),
    [
        ("add_operation.md", "The complete minimal operation", "acme_operation", CHECK_OPERATION),
        ("add_backend.md", "The complete minimal kernel", "acme_kernels", CHECK_KERNEL),
        ("add_backend.md", "The complete minimal kernel in Triton", "acme_triton", CHECK_KERNEL),
    ],
)
def test_a_complete_example_runs(page, heading, module, checks, tmp_path):
    if module == "acme_triton":
        pytest.importorskip("triton")
    (tmp_path / f"{module}.py").write_text(first_python_block(page, heading), encoding="utf-8")
    interpret = {"TRITON_INTERPRET": "1"} if module == "acme_triton" else {}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "EJKERNEL_UNCONFIRMED": "allow", **interpret}
    run_successfully([sys.executable, "-c", REGISTER_MODULES + checks, module], environment)


def run_successfully(command, environment):
    """Runs a command that has to succeed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def apply_diffs(section, folder):
    """Applies the diffs of a section to the files of a folder: the lines of each hunk are in the file exactly once."""
    for diff in re.findall(r"^```diff\n\+\+\+ (.*?)^```", section, re.M | re.S):
        name, hunks = diff.split("\n", 1)
        file = folder / name
        text = file.read_text(encoding="utf-8")
        for hunk in hunks.split("@@\n"):
            lines = hunk.splitlines()
            before, after = (
                "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", sign)) for sign in ("-", "+")
            )
            assert text.count(before) == 1, f"{name}: {before!r} is there {text.count(before)} times"
            text = text.replace(before, after)
        file.write_text(text, encoding="utf-8")


def copy_sources(folder):
    """Copies the sources of core and XLA, as they are laid out in the repository; returns their folders."""
    sources = [Path("packages/ejkernel-core/src"), Path("packages/ejkernel-xla/src")]
    for source in sources:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
    return [folder / source for source in sources]


def section_of_add_argument(heading):
    page = (DOCS / "add_argument.md").read_text(encoding="utf-8")
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def python_code_of(section):
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S))


def test_the_page_on_adding_a_field_works_as_it_stands(tmp_path):
    section = section_of_add_argument("Add a field to a family")
    paths = os.pathsep.join(map(str, copy_sources(tmp_path)))
    apply_diffs(section, tmp_path)
    environment = {**os.environ, "PYTHONPATH": paths, "EJKERNEL_UNCONFIRMED": "allow"}
    check = f"import ejkernel, ejkernel_xla\nassert ejkernel.__file__.startswith({str(tmp_path)!r})\n"
    run_successfully([sys.executable, "-c", check + python_code_of(section)], environment)
    (suite,) = re.findall(r"^\$ pytest (.*)$", section, re.M)
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-q", "--ejk-transform", "test_gradients"]
    run_successfully([sys.executable, "-m", "pytest", *suite.split(), *options], environment)


def test_the_page_on_teaching_a_kernel_an_argument_works_as_it_stands(tmp_path):
    pytest.importorskip("triton")
    section = section_of_add_argument("Teach a kernel an argument that its family has")
    kernel = first_python_block("add_backend.md", "The complete minimal kernel in Triton")
    (tmp_path / "acme_triton.py").write_text(kernel, encoding="utf-8")
    apply_diffs(section, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "EJKERNEL_UNCONFIRMED": "allow", "TRITON_INTERPRET": "1"}
    run_successfully([sys.executable, "-c", REGISTER_MODULES + python_code_of(section), "acme_triton"], environment)


def test_an_operation_is_a_module_and_a_line_of_the_stub(tmp_path):
    """The third file is the test of its reference: here, the checks of the complete example."""
    core, xla = copy_sources(tmp_path)
    code = first_python_block("add_operation.md", "The complete minimal operation")
    (core / "ejkernel/modules/operations/cosine_attention.py").write_text(code, encoding="utf-8")
    with (core / "ejkernel/modules/__init__.pyi").open("a", encoding="utf-8") as stub:
        stub.write("from ejkernel.modules.operations.cosine_attention import cosine_attention as cosine_attention\n")
    check = f"""
import jax, ejkernel
from ejkernel.modules import cosine_attention
assert ejkernel.__file__.startswith({str(tmp_path)!r})
x = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))
assert cosine_attention(x, x, x, causal=True).shape == x.shape
assert ejkernel.explain("cosine_attention", x, x, x).forward.implementation.name == "xla"
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (core, xla))), "EJKERNEL_UNCONFIRMED": "allow"}
    run_successfully([sys.executable, "-c", check], environment)


def test_an_argument_touches_three_files_of_core():
    section = section_of_add_argument("Add a field to a family")
    files = re.findall(r"^```diff\n\+\+\+ (.*)", section, re.M)
    core = [name.split("/ejkernel/")[1] for name in files if "/ejkernel-core/" in name]
    assert core == [
        "families/tiled_attention/record.py",
        "families/tiled_attention/reference.py",
        "modules/operations/flash_attention.py",
    ]
    assert {name.split("/")[1] for name in files} == {"ejkernel-core", "ejkernel-xla"}  # then, the passes of a kernel


@pytest.mark.parametrize(("page", "count", "word"), [("add_operation.md", 10, "ten"), ("add_backend.md", 12, "twelve")])
def test_a_minimal_example_has_the_concepts_that_are_listed(page, count, word):
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    (listed,) = re.findall(rf"Its {word} concepts are (.*?)\. ", text)
    concepts = re.split(r", | and ", listed)
    assert len(concepts) == count, concepts
    assert f"{count} concepts" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = text.split("The complete minimal ")[1]
    names = [name for concept in concepts for name in re.findall(r"`(\w+)`", concept)]
    assert names
    assert not [name for name in names if not re.search(rf"\b{name}\b", example)]
