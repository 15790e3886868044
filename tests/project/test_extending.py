"""The complete minimal operation and kernels of `docs/extending/`, run through dispatch in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs/extending"

PROGRAM = """
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

OPERATION = """
from acme_operation import OP, cosine_attention, inputs
args = inputs(jax.random.key(0))
output = cosine_attention(args.query, args.key, args.value, causal=True)
assert jnp.abs(output - OP.reference(args)).max() < 1e-5
gradient = jax.grad(lambda query: cosine_attention(query, args.key, args.value, causal=True).sum())(args.query)
assert jnp.isfinite(gradient).all() and gradient.any()
"""

KERNEL = """
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


def block(page: str, heading: str) -> str:
    """The Python example of a section."""
    section = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    return section.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize(
    ("page", "heading", "module", "checks"),
    [
        ("add_operation.md", "The complete minimal operation", "acme_operation", OPERATION),
        ("add_backend.md", "The complete minimal kernel", "acme_kernels", KERNEL),
        ("add_backend.md", "The complete minimal kernel in Triton", "acme_triton", KERNEL),
    ],
)
def test_a_complete_example_runs(page, heading, module, checks, tmp_path):
    if module == "acme_triton":
        pytest.importorskip("triton")
    (tmp_path / f"{module}.py").write_text(block(page, heading), encoding="utf-8")
    interpret = {"TRITON_INTERPRET": "1"} if module == "acme_triton" else {}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "EJKERNEL_UNCONFIRMED": "allow", **interpret}
    command = [sys.executable, "-c", PROGRAM + checks, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
