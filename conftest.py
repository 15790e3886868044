"""Execute the fenced Python of the README, CONTRIBUTING and `docs/`: `pytest docs README.md`."""

import os
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# The distributed tests and examples need several devices. The tests are thousands of small programs, which take longer
# to optimise than to run. JAX reads this when it first looks for devices, not at import.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/operations/*.md"],
    path=str(Path(__file__).parent),
).pytest()
