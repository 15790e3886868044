"""What the library does not import."""

import subprocess
import sys

import pytest

HEAVY = ("click", "rich", "tqdm", "matplotlib", "triton", "jax_triton", "jax.experimental.pallas")


@pytest.mark.parametrize("statement", ["import ejkernel", "from ejkernel.modules import flash_attention"])
def test_the_library_imports_nothing_of_the_command_line_or_a_toolchain(statement):
    script = f"import sys; {statement}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == []


def test_the_command_line_leaves_matplotlib_to_plots():
    script = "import sys, ejkernel.cli; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "False"
