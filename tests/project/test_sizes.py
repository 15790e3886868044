"""Functions and files outside of kernels are short, as CONTRIBUTING.md says."""

import ast
import functools
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_FILE_LINES, MAX_KERNEL_LINES = 40, 8, 400, 250
PUBLIC = (
    "ejkernel/modules/ragged.py",
    "ejkernel/modules/operations/[a-z]*.py",
    "ejkernel/compat/*",
    "ejkernel/types/constructors.py",
    "ejkernel/types/visualize.py",
    "ejkernel/quantization/*.py",
)
"""Where users' own functions are, which have as many parameters as the call has arguments."""


@functools.cache
def _sources():
    """Source text by path below `src/` or `examples/`."""
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for root in (*ROOT.glob("packages/*/src"), ROOT / "examples")
        for path in sorted(root.rglob("*.py"))
    }


def _is_kernel(path):
    return "/kernels/" in path


def _functions(path):
    """The functions of a file, methods and functions within functions among them."""
    tree = ast.parse(_sources()[path])
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _code_lines(function):
    """The lines of a function, decorators included, without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    documented = 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
    first = min([function.lineno, *(x.lineno for x in function.decorator_list)])
    return function.end_lineno - first + 1 - documented


def _parameters(function):
    """The number of parameters of a function, without `self`."""
    args = function.args
    named = [x.arg for x in (*args.posonlyargs, *args.args, *args.kwonlyargs) if x.arg not in ("self", "cls")]
    return len(named) + (args.vararg is not None) + (args.kwarg is not None)


def test_functions_are_short():
    long = {
        f"{path}: {x.name} has {_code_lines(x)} lines"
        for path in _sources()
        for x in _functions(path)
        if _code_lines(x) > (MAX_KERNEL_LINES if _is_kernel(path) else MAX_FUNCTION_LINES)
    }
    assert not long


def test_functions_have_few_parameters():
    wide = {
        f"{path}: {x.name} has {_parameters(x)} parameters"
        for path in _sources()
        if not _is_kernel(path)
        for x in _functions(path)
        if _parameters(x) > MAX_PARAMETERS
        if x.name.startswith("_") or not any(fnmatch(path, pattern) for pattern in PUBLIC)
    }
    assert not wide


def test_files_are_short():
    lengths = {path: text.count("\n") for path, text in _sources().items() if not _is_kernel(path)}
    assert len(lengths) > 300
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_docstrings_and_self_do_not_count():
    (method,) = ast.parse('def f(self, a, *b):\n    """One\n    two."""\n    return a\n').body
    assert (_code_lines(method), _parameters(method)) == (2, 2)
