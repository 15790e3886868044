"""Checks what plugins declare: names that do not exist, which would otherwise show at the first call or never.

`ejkernel doctor` runs the checks. The checks import no kernel and no toolchain: they find a module and read its source.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp

from ejkernel.families.contract import Family
from ejkernel.ops.model import Implementation, Requires
from ejkernel.ops.plugins import Registry
from ejkernel.ops.toolchain import is_importable, requirement_error
from ejkernel.suggestion import did_you_mean
from ejkernel.types.arguments import optional_fields

DEVICE_NAMES = frozenset({"cpu", "gpu", "nvidia", "amd", "tpu"})
OPTIONAL_PULLBACK_FIELDS = frozenset({"lse_cotangent"})  # what a backward pass may handle in addition to record fields


def wrong_declarations(registry: Registry) -> dict[str, list[str]]:
    """Returns the error messages of each plugin whose implementations declare names that do not exist."""
    families = {op.family.name: op.family for op in registry.ops.values()}
    by_plugin: dict[str, list[str]] = {}
    for (op, name), plugin in registry.plugin_by_implementation.items():
        implementation = next(one for one in registry.implementations[op] if one.name == name)
        sentences = by_plugin.setdefault(plugin, [])
        for problem in declaration_errors(implementation, families[implementation.family]):
            sentence = f"implementation {name!r} of {implementation.family}: {problem}"
            if sentence not in sentences:
                sentences.append(sentence)
    return {plugin: sentences for plugin, sentences in by_plugin.items() if sentences}


def declaration_errors(implementation: Implementation, family: Family) -> Iterator[str]:
    """Yields an error message for each name that an implementation declares and that does not exist."""
    yield from _unknown_name_errors("gradients", implementation.gradients, family.differentiable)
    for field in ("requires", "backward_requires"):
        requires: Requires | None = getattr(implementation, field)
        if requires is not None:
            yield from _requirement_problems(field, requires, family)
    for field in ("forward", "backward", "cases"):
        path = getattr(implementation, field)
        problem = None if path is None else object_path_error(path)
        if problem is not None:
            yield f"{field}: {problem}"
    if implementation.package is not None and not is_importable(implementation.package):
        yield f"package: there is no package {implementation.package!r}"


def _requirement_problems(field: str, requires: Requires, family: Family) -> Iterator[str]:
    optional = set(optional_fields(family.record)) | OPTIONAL_PULLBACK_FIELDS
    yield from _unknown_name_errors(f"{field}.handles", requires.handles, optional)
    yield from _unknown_name_errors(f"{field}.devices", requires.devices, DEVICE_NAMES)
    for dtype in sorted(requires.dtypes):
        reason = _dtype_name_error(dtype)
        if reason:
            yield f"{field}.dtypes: {reason}"
    yield from (f"{field}.{error}" for error in map(requirement_error, requires.modules) if error)


def _unknown_name_errors(field: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    known = sorted(known)
    for name in sorted(set(names) - set(known)):
        yield f"{field}: there is no {name!r}{did_you_mean(name, known) or '; there are ' + ', '.join(known)}"


def _dtype_name_error(name: str) -> str:
    """Returns why a name is no dtype's; empty if it is."""
    try:
        real = jnp.dtype(name).name
    except TypeError:
        return f"there is no dtype {name!r}, names are as in jax.numpy: 'float32', 'bfloat16'"
    return "" if real == name else f"got {name!r}, wants {real!r}"


def object_path_error(path: str) -> str | None:
    """Returns why `"module:attribute"` cannot be what it names; None if it can, as far as its source tells."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        return f"got {path!r}, wants 'module:attribute'"
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            return None  # a package above the module imports a toolchain that is not installed
        return f"{path!r}: there is no module {error.name!r}"
    except ImportError:
        return None
    if spec is None:
        return f"{path!r}: there is no module {module!r}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    names = _names_defined_by_module(Path(spec.origin))
    if names is None or attribute in names:
        return None
    return f"{path!r}: module {module!r} has no {attribute!r}{did_you_mean(attribute, names)}"


@functools.cache
def _names_defined_by_module(path: Path) -> frozenset[str] | None:
    """Returns the names that a module defines at its top level; None if its source does not tell."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in _import_time_statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return None if "*" in names or "__getattr__" in names else frozenset(names)


def _import_time_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when a module is imported, those within `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            blocks = (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))
            handlers = (handler.body for handler in getattr(node, "handlers", []))
            for block in (*blocks, *handlers):
                yield from _import_time_statements(block)


__all__ = ["declaration_errors", "object_path_error", "wrong_declarations"]
