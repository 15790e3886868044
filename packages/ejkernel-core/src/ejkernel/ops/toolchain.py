"""Checks that the modules an implementation needs are installed, in versions that it supports.

A backend bounds what it imports here and not in its metadata: an upper bound there makes installers take an older JAX,
where a refusal leaves the environment as it is and says what is missing.
"""

import functools
import importlib.metadata
import importlib.util
import re

_REQUIREMENT_PATTERN = re.compile(r"\s*([\w.]+)\s*(.*)")


def split_requirement(requirement: str) -> tuple[str, str]:
    """Returns the module of `"jax_triton>=0.3.1,<0.5"`, and the versions of it that will do; none are all."""
    match = _REQUIREMENT_PATTERN.fullmatch(requirement)
    if match is None:
        raise ValueError(
            f"modules: got {requirement!r}, wants a module and versions of it, such as 'jax_triton>=0.3.1'"
        )
    return match[1], match[2]


def requirement_error(needed: str) -> str | None:
    """Returns what is wrong with a requirement as a text; None if it names a module and versions."""
    from packaging.specifiers import SpecifierSet

    try:
        SpecifierSet(split_requirement(needed)[1])
    except ValueError as error:
        return str(error) if str(error).startswith("modules") else f"modules: {error}"
    return None


@functools.cache
def missing_module_reason(needed: str) -> str | None:
    """Returns a sentence saying what is wrong with a module here, or with the requirement; None where it will do.

    Args:
        needed: Top-level module, with the versions of its distribution that will do if not all.
    """
    error = requirement_error(needed)
    if error is not None:
        return error
    module, versions = split_requirement(needed)
    if not is_importable(module):
        return f"module {module} is not installed" + (f", needs {versions}" if versions else "")
    installed = _installed_version(module) if versions else None
    if installed is None:  # a module on the path without metadata does not say what it is
        return None
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(versions).contains(installed, prereleases=True):
        return None
    return f"module {module} {installed} is installed, needs {versions}"


def is_importable(module: str) -> bool:
    """Returns whether there is a module of this name, without importing it; the package around it is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # there is no package around it, it fails, or this is no name of a module
        return False


def _installed_version(module: str) -> str | None:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return None
