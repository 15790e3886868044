"""What `pip install ejkernel[gpu]` installs today, for `ejkernel doctor`: asks the package index through uv.

python tests/project/gpu_versions.py          # prints it
python tests/project/gpu_versions.py --write  # renews packages/ejkernel-core/src/ejkernel/cli/gpu_versions.json
"""

import datetime
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS_FILE = ROOT / "packages/ejkernel-core/src/ejkernel/cli/gpu_versions.json"
SERVED_PYTHONS = ("3.11", "3.12", "3.13")
MODULE_BY_DISTRIBUTION = {"jax": "jax", "jax-triton": "jax_triton", "triton": "triton"}
PLATFORM = "x86_64-manylinux_2_28"


def backend_requirements() -> str:
    """What the backends of the extra `gpu` need from the index, from their metadata."""
    lines = ["jax[cuda13]"]
    for name in ("core", "xla", "triton", "pallas", "cuda"):
        manifest = tomllib.loads((ROOT / f"packages/ejkernel-{name}/pyproject.toml").read_text())
        lines += [line for line in manifest["project"]["dependencies"] if not line.startswith("ejkernel")]
    return "\n".join(lines)


def resolve_versions(python: str) -> dict[str, str]:
    """The versions for one Python."""
    options = ["--no-header", "--no-annotate", "--python-version", python, "--python-platform", PLATFORM]
    command = ["uv", "pip", "compile", "-q", *options, "-"]
    done = subprocess.run(
        command, input=backend_requirements(), capture_output=True, text=True, timeout=300, check=True
    )
    found = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    return {module: found[name] for name, module in MODULE_BY_DISTRIBUTION.items()}


def resolve_all() -> dict[str, dict[str, str]]:
    """The versions for every Python that is served."""
    return {python: resolve_versions(python) for python in SERVED_PYTHONS}


if __name__ == "__main__":
    content = {"date": datetime.date.today().isoformat(), "pythons": resolve_all()}
    text = json.dumps(content, indent=1) + "\n"
    if "--write" in sys.argv:
        VERSIONS_FILE.write_text(text)
    else:
        print(text, end="")
