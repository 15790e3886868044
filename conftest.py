"""Settings of all tests; and the fenced Python of the README, CONTRIBUTING and `docs/`: `pytest docs README.md`."""

import gc
import itertools
import os
import sys
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Also for examples, and for the suite in processes of their own, which do without tests/conftest.py.
sys.path.insert(0, str(Path(__file__).parent / "tests" / "support"))

from suite import contexts

contexts.install()

# The distributed tests and examples need several devices. JAX reads this when it looks for devices, not at import.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# Tests of dispatch are about its order by priority: evidence is stale as soon as somebody works on a kernel.
os.environ.setdefault("EJKERNEL_UNCONFIRMED", "allow")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/operations/*.md", "docs/extending/*.md"],
    path=str(Path(__file__).parent),
).pytest()

_finished = itertools.count(1)
_MAPS = Path("/proc/self/maps")
MOST_MAPS = 4096
"""A sixteenth of what Linux gives a process; a test that compiles takes about 60, and a worker about 3 GB by then."""


def pytest_configure() -> None:
    """Look for garbage rarely: nearly all of the millions of objects that tracing makes go without being looked for."""
    gc.set_threshold(100_000, 20, 100)


def pytest_collection_finish() -> None:
    """Leave the tests themselves, which stay, out of later searches for garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let go of what was kept from the search for garbage: bindings report what is left when a process ends."""
    gc.unfreeze()


def pytest_runtest_teardown() -> None:
    """Forget compiled programs when there are many. They hold memory maps, of which a process gets a limited number."""
    if next(_finished) % 100 == 0 and (not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > MOST_MAPS):
        jax.clear_caches()
        gc.collect()
