"""A digest of the sources that an implementation's kernels consist of.

Evidence says which sources a chip has confirmed. The digest covers every function, class and constant of the backend's
own package that the implementation's passes, heuristic, candidates and refusals reach by name, its toolkit included,
and what it declares in `requires`. It is taken from the syntax trees, without comments, docstrings and layout: those
can be edited without a run on a GPU. C++ sources are in the folders of `csrc`, next to the package's `src` folder; they
count without comments and layout too. Core's planning code does not count: it is plain JAX, which the tests on a CPU
confirm.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ejkernel.ops.model import Implementation, Requires

_REFERENCE_PATTERN = re.compile(r"([a-zA-Z_][\w.]*):([a-zA-Z_]\w*)")
_HANDLER_PATTERN = re.compile(r"(?:XLA_FFI_DEFINE_HANDLER_SYMBOL|EJKERNEL_FFI_HANDLER)\(\s*(\w+)")
_INCLUDE_PATTERN = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_COMMENT_PATTERN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)

# Fields that depend on the version of Python, or that say nothing about what a program does.
_IGNORED_AST_FIELDS = frozenset({"type_params", "type_comment", "type_ignores", "kind", "ctx"})

Definition = tuple[str, str]
"""A module and the name of something that it defines."""


def source_digest(implementation: Implementation) -> str:
    """Returns sixteen hexadecimal digits that change, and make evidence stale, with the sources of an implementation
    and with what it requires.
    """
    closure = _SourceClosure(implementation.forward.partition(":")[0].partition(".")[0])
    functions = (
        implementation.forward,
        implementation.backward,
        implementation.forward_mode,
        implementation.row_states,
    )
    for path in filter(None, functions):
        module, _, name = path.partition(":")
        closure.add(module, name)
    space = implementation.config
    refusals = {implementation.requires_for(direction).extra: None for direction in ("forward", "backward")}
    for function in (space.heuristic, space.candidates, *refusals):
        closure.add_function(function)
    pieces = [*closure.source_texts(), *_declared_requirements(implementation)]
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:16]


def _declared_requirements(implementation: Implementation) -> Iterator[str]:
    """Yields what an implementation says that it serves: new claims have yet to be confirmed."""
    for direction in ("forward", "backward"):
        requires: Requires = implementation.requires_for(direction)
        sizes = requires.head_dims if isinstance(requires.head_dims, range | None) else sorted(requires.head_dims)  # type: ignore[type-var]
        yield f"{direction} {sorted(requires.dtypes)} {sorted(requires.handles)} {sizes} {requires.symbolic}"
    yield f"{sorted(implementation.gradients)} {implementation.paired} {sorted(implementation.only or ())}"


class _SourceClosure:
    """The definitions of one package that some of them reach by name."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.texts: dict[Definition, str] = {}
        self.sources: set[Path] = set()

    def add(self, module: str, name: str) -> None:
        """Adds a definition, and all that it reaches."""
        pending = [(module, name)]
        while pending:
            definition = pending.pop()
            if definition in self.texts or not _is_in_package(self.package, definition[0]):
                continue
            contents = _read_definition(*definition)
            self.texts[definition] = contents.text
            pending += contents.references
            for text in contents.strings:
                self._add_source(ffi_handlers(self.package).get(text))

    def add_function(self, function: Any) -> None:
        """Adds a function; of one without a name at the top of its module, the whole module."""
        function = getattr(function, "func", function)  # functools.partial
        module, name = function.__module__, function.__qualname__.partition(".")[0]
        names = [name] if name in _parse_module(module).definitions else _parse_module(module).definitions
        for each in names:
            self.add(module, each)

    def source_texts(self) -> Iterator[str]:
        """Yields the texts of all definitions and C++ sources, in an order that depends on their names alone."""
        for module, name in sorted(self.texts):
            yield f"{module}:{name} {self.texts[module, name]}"
        for path in sorted(self.sources):
            yield f"{path.relative_to(_cpp_root(self.package)).as_posix()} {_cpp_without_comments(path)}"

    def _add_source(self, path: Path | None) -> None:
        """Adds a C++ file with the headers that it includes, and the files that define what those declare."""
        if path is None or path in self.sources or not path.is_file():
            return
        self.sources.add(path)
        for name in _INCLUDE_PATTERN.findall(path.read_text(encoding="utf-8")):
            header = path.parent / name  # where the compiler looks first
            self._add_source(header if header.is_file() else _cpp_root(self.package) / name)
        self._add_source(path.with_suffix(".cu"))


@dataclasses.dataclass(frozen=True)
class _DefinitionSource:
    """One definition.

    Attributes:
        text: Its syntax tree.
        references: The definitions of the same package that it names.
        strings: The string constants in it, some of which may name C++ handlers.
    """

    text: str
    references: tuple[Definition, ...]
    strings: tuple[str, ...] = ()


@functools.cache
def _read_definition(module: str, name: str) -> _DefinitionSource:
    parsed = _parse_module(module)
    if name not in parsed.definitions:  # imported there from another module, or assigned in another way
        return _DefinitionSource("", tuple(_imported_definition(parsed, name)))
    nodes = parsed.definitions[name]
    parts = [part for node in nodes for part in ast.walk(node)]
    references: list[Definition] = [(module, "")]
    for part in parts:
        references += _referenced_definitions(module, parsed, part)
    strings = (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return _DefinitionSource(" ".join(map(_canonical_dump, nodes)), tuple(references), tuple(strings))


def _referenced_definitions(module: str, parsed: "_ParsedModule", node: ast.AST) -> list[Definition]:
    """Returns the definitions that a piece of a module's syntax tree names."""
    if isinstance(node, ast.Name):
        return [(module, node.id)] if node.id in parsed.definitions else _imported_definition(parsed, node.id)
    if isinstance(node, ast.Attribute) and (path := _dotted_names(node)):
        return _attribute_definition(module.partition(".")[0], parsed, path)
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (match := _REFERENCE_PATTERN.fullmatch(node.value))
    ):
        ours = _is_in_package(module.partition(".")[0], match[1]) and _is_module(match[1])
        return [(match[1], match[2])] if ours else []
    return []


def _imported_definition(parsed: "_ParsedModule", name: str) -> list[Definition]:
    """Returns the definition that an imported name stands for; nothing for a module, whose attributes say more."""
    target = parsed.imports.get(name)
    return [target] if target and target[1] and not _is_module(".".join(target)) else []


def _attribute_definition(package: str, parsed: "_ParsedModule", path: list[str]) -> list[Definition]:
    """Returns the definition that `module.name` stands for, where the first name is an imported module
    of the package.
    """
    target = parsed.imports.get(path[0])
    if target is None:
        return []
    module, rest = ".".join(filter(None, target)), path[1:]
    while rest and _is_in_package(package, module) and _is_module(f"{module}.{rest[0]}"):
        module, rest = f"{module}.{rest[0]}", rest[1:]
    return [(module, rest[0])] if rest and _is_in_package(package, module) and _is_module(module) else []


def _is_in_package(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@dataclasses.dataclass(frozen=True)
class _ParsedModule:
    """The definitions and imports of a module, by name.

    Attributes:
        definitions: Name -> the statements that define it; under `""` those that define nothing.
        imports: Name -> module and the name there, which is empty for a module.
    """

    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, Definition]


@functools.cache
def _parse_module(module: str) -> _ParsedModule:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return _ParsedModule({}, {})
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    parsed = _ParsedModule({"": []}, {})
    for statement in tree.body:
        for name in _defined_names(statement):
            parsed.definitions.setdefault(name, []).append(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            parsed.imports.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                parsed.imports[alias.asname or first] = (alias.name if alias.asname else first, "")
    return parsed


def _defined_names(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement at the top of a module defines; `""` for a statement that defines nothing."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom) or _is_docstring(statement):
        return []
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        return [name for name in names if name != "__all__"]
    return [""]


def _is_docstring(node: Any) -> bool:
    """Returns whether a statement is only a string: a docstring, or a string that documents an assignment."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dotted_names(node: ast.expr) -> list[str]:
    """Returns the names of `a.b.c`; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent is no package
        return False


def _canonical_dump(node: Any) -> str:
    """Returns a syntax tree as text that is the same under every version of Python."""
    if isinstance(node, list):
        return f"[{' '.join(_canonical_dump(each) for each in node if not _is_docstring(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty pieces
        node = ast.JoinedStr([x for x in node.values if not isinstance(x, ast.Constant) or x.value])
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED_AST_FIELDS)
    arguments = [f"{name}={_canonical_dump(value)}" for name, value in fields if value is not None and value != []]
    return f"{type(node).__name__}({' '.join(arguments)})"


@functools.cache
def _cpp_root(package: str) -> Path:
    """Returns the folder of a package's C++ sources, which need not exist: includes are relative to it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return (Path(folders[0]).parents[1] if folders else Path(package)) / "csrc"


@functools.cache
def ffi_handlers(package: str) -> dict[str, Path]:
    """Returns the symbols of a package's FFI handlers, and the C++ files that define them."""
    sources = sorted(_cpp_root(package).rglob("*.cu"))
    return {symbol: path for path in sources for symbol in _HANDLER_PATTERN.findall(path.read_text(encoding="utf-8"))}


def _cpp_without_comments(path: Path) -> str:
    """Returns a C++ source without comments and layout."""
    text = _COMMENT_PATTERN.sub(
        lambda match: match[0] if match[0].startswith('"') else " ", path.read_text(encoding="utf-8")
    )
    return " ".join(text.split())
