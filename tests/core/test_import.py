"""Importing ejkernel does nothing but define things."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, os, sys
before = dict(os.environ)
import jax
known = set(sys.modules)
import ejkernel, ejkernel.modules, ejkernel.ops, ejkernel.types
from jax._src import xla_bridge
print(json.dumps({
    "initialised": xla_bridge.backends_are_initialized(),
    "environment": dict(os.environ) != before,
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - known}),
    "pallas": [name for name in sys.modules if "pallas" in name],
    "plugins": len(ejkernel.ops.plugins.loaded_registries),
}))
"""


def test_importing_has_no_side_effects(tmp_path: Path):
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("EJKERNEL_PERSISTENT_CACHE_DIR", None)

    done = subprocess.run(
        [sys.executable, "-B", "-c", PROBE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["initialised"]
    assert not found["environment"]
    assert found["pallas"] == []
    assert found["plugins"] == 0
    heavy = {"triton", "jax_triton", "click", "rich", "matplotlib", "tqdm", "filelock", "platformdirs", "hypothesis"}
    backends = {"ejkernel_xla", "ejkernel_triton", "ejkernel_pallas", "ejkernel_cuda", "ejkernel_conformance"}
    assert not (heavy | backends) & set(found["modules"])
    assert list(tmp_path.rglob("*")) == []
    assert done.stderr == ""
