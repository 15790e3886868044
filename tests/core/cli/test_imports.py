"""What the library does not import."""

import subprocess
import sys

HEAVY = ("click", "rich", "tqdm", "matplotlib", "triton", "jax_triton", "jax.experimental.pallas")
STATEMENTS = (
    "import ejkernel",
    "from ejkernel.modules import flash_attention",
    "from ejkernel.ops.plugins import registry; registry()",
)


def test_the_library_and_its_plugins_import_nothing_of_the_command_line_or_a_toolchain():
    """In one process, statement after statement."""
    probe = f"; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    script = "import sys\n" + "\n".join(statement + probe for statement in STATEMENTS)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["" for _ in STATEMENTS]


def test_the_command_line_leaves_matplotlib_to_plots():
    script = "import sys, ejkernel.cli; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "False"
