"""What installers make of the distributions: our own wheels, every extra, and the JAX that was there before.

The index holds another project's releases of the name `ejkernel`, up to 0.0.80.3. `nox -s resolve` resolves every extra
against the built wheels, for each Python and JAX, with pip and uv; the tests without that mark read the metadata.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import gpu_versions
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
MANIFESTS = [ROOT / "pyproject.toml", *sorted((ROOT / "packages").glob("*/pyproject.toml"))]
VERSION = Version("0.2.0")
OTHER_PROJECTS_VERSION = Version("0.0.80.3")
WHEELS = os.environ.get("EJKERNEL_WHEELS")
# Of each JAX the index has wheels for these Pythons.
PYTHON_AND_JAX_PAIRS = [
    ("3.11", "0.10"),
    *((python, jax) for python in ("3.12", "3.13") for jax in ("0.10", "0.11", "0.12")),
]
EXTRAS = ("", "gpu", "rocm", "tpu", "all")
PLATFORM = "x86_64-manylinux_2_36"  # the libtpu of JAX 0.12 has no wheels for older C libraries


def projects() -> dict[str, dict]:
    """The `project` tables by distribution."""
    tables = [tomllib.loads(path.read_text())["project"] for path in MANIFESTS]
    return {table["name"]: table for table in tables}


def requirements(table: dict) -> list[Requirement]:
    """Everything a distribution asks for, extras included."""
    lines = [*table["dependencies"], *(x for extra in table.get("optional-dependencies", {}).values() for x in extra)]
    return [Requirement(line) for line in lines]


def test_versions_move_together_and_are_above_the_other_projects():
    core = (ROOT / "packages/ejkernel-core/src/ejkernel/_version.py").read_text()
    (version,) = re.findall(r'__version__ = "(.+)"', core)
    assert Version(version) == VERSION > OTHER_PROJECTS_VERSION
    found = projects()
    assert len(found) == 6
    assert {table["version"] for name, table in found.items() if name != "ejkernel-core"} == {version}
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_extra_and_no_backend_falls_back_to_another_projects_release():
    for name, table in projects().items():
        ours = [r for r in requirements(table) if r.name.startswith("ejkernel")]
        assert ours or name == "ejkernel-core"
        for requirement in ours:
            assert VERSION in requirement.specifier, f"{name}: {requirement}"
            assert OTHER_PROJECTS_VERSION not in requirement.specifier, f"{name}: {requirement}"
            assert Version("0.3.0") not in requirement.specifier, f"{name}: {requirement}"


def test_no_distribution_bounds_jax_from_above():
    bounding = {"<", "<=", "==", "~=", "===", "!="}
    for name, table in projects().items():
        for requirement in requirements(table):
            if requirement.name.startswith("jax"):
                assert not bounding & {s.operator for s in requirement.specifier}, f"{name}: {requirement}"


@pytest.mark.parametrize("page", ["README.md", "docs/quick_start.md"])
def test_pages_lead_with_an_installation_that_works_today(page):
    text = (ROOT / page).read_text()
    commands = re.findall(r"pip install .*", text)
    first = min(text.index("./packages/ejkernel-core"), text.index("--find-links"))
    assert commands
    for command in commands:
        bare = re.search(r"[\"' ]ejkernel(\[\w+\])?[\"'\s`]", command + "\n")
        assert not bare, f"{page} installs another project's release: {command}"
    assert first < 400 + text.index("pip install")


# --- resolved ---------------------------------------------------------------------------------------------------------


def resolved_by_uv(wanted: str, python: str, jax: str) -> dict[str, str]:
    """What uv would install, by name; it needs no such Python."""
    options = ["--no-header", "--no-annotate", "--python-version", python, "--python-platform", PLATFORM]
    command = ["uv", "pip", "compile", "-q", *options, "--find-links", str(WHEELS), "-"]
    done = subprocess.run(command, input=f"{wanted}\njax=={jax}.*\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split("==") for line in done.stdout.split() if "==" in line)


def resolved_by_pip(wanted: str, python: str, jax: str) -> dict[str, str]:
    """What pip would install, by name; markers are those of the Python that runs it."""
    interpreter = shutil.which(f"python{python}")
    options = ["--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:", "--report", "-"]
    command = [interpreter, "-m", "pip", "install", *options, "--find-links", str(WHEELS), wanted, f"jax=={jax}.*"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    items = json.loads(done.stdout)["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in items}


RESOLUTIONS = [
    pytest.param(resolve, *pair, marks=needs, id=f"{name}-{'-'.join(pair)}")
    for pair in PYTHON_AND_JAX_PAIRS
    for resolve, name, needs in [
        (resolved_by_uv, "uv", ()),
        (resolved_by_pip, "pip", pytest.mark.needs(f"python{pair[0]}")),
    ]
]


@pytest.mark.needs("wheels")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("resolve", "python", "jax"), RESOLUTIONS)
def test_every_extra_resolves_to_our_wheels_and_keeps_jax(resolve, python, jax, extra):
    found = resolve(f"ejkernel[{extra}]" if extra else "ejkernel", python, jax)
    ours = {name: version for name, version in found.items() if name.startswith("ejkernel")}
    assert set(ours.values()) == {str(VERSION)}, ours
    assert ours.keys() >= {"ejkernel", "ejkernel-core", "ejkernel-xla"}
    parts = {"gpu": {"cuda", "pallas", "triton"}, "rocm": {"triton"}, "tpu": {"pallas"}}
    parts["all"] = parts["gpu"]
    assert ours.keys() >= {f"ejkernel-{part}" for part in parts.get(extra, ())}
    assert found["jax"].startswith(f"{jax}.")


@pytest.mark.needs("wheels")
def test_doctor_shows_the_versions_that_are_installed_today():
    shown = json.loads(gpu_versions.VERSIONS_FILE.read_text())["pythons"]
    assert shown == gpu_versions.resolve_all(), "python tests/project/gpu_versions.py --write renews what doctor shows"
