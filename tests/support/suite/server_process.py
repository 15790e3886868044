"""Runs what `servers.py` asks for, one request after the other: a line of JSON each, and a line of JSON in reply."""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Generator
from typing import Any

import jax
import pytest

from suite import interpreted_operators


def main() -> None:
    """Runs requests until there are no more."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted_operators.install()
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        before = _processor_seconds()
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            with _redirected(output.fileno(), errors.fileno()), _restored():
                returncode = _run(json.loads(line))
            reply: dict[str, Any] = {"returncode": returncode, "stdout": _text(output), "stderr": _text(errors)}
        reply["seconds"] = _processor_seconds() - before
        print(json.dumps(reply), file=replies, flush=True)


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()


def _run(request: list[str]) -> int:
    """Runs pytest with the arguments of a request, or a script, and returns the status that it would exit with."""
    kind, *arguments = request
    try:
        if kind == "pytest":
            # What earlier requests have imported is not rewritten.
            return int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  # the next request is another test's
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _redirected(output: int, errors: int) -> Generator[None]:
    """Sends what this process and those that it starts print to files."""
    saved = os.dup(1), os.dup(2)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    try:
        yield
    finally:
        for stream, descriptor, before in zip((sys.stdout, sys.stderr), (1, 2), saved, strict=True):
            stream.flush()
            os.dup2(before, descriptor)
            os.close(before)


@contextlib.contextmanager
def _restored() -> Generator[None]:
    """Restores what a request may change for the next one."""
    options: dict[str, Any] = dict(jax.config.values)
    variables, path, arguments, folder = dict(os.environ), list(sys.path), list(sys.argv), os.getcwd()
    try:
        yield
    finally:
        now: dict[str, Any] = dict(jax.config.values)
        for name, value in options.items():
            if now[name] != value:
                jax.config.update(name, value)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:], sys.argv = path, arguments
        os.chdir(folder)


if __name__ == "__main__":
    main()
