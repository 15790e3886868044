"""A process that runs tests: it reads requests from its standard input, and answers on its standard output.

A request is `{"list": ...}` or `{"run": [tests], "until": time}`. Answers are messages, one per line. A test is
announced before it runs: where the process ends, the last one announced is the test that ended it.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.device import current_device
from ejkernel_conformance.confirm.listing import SuiteTest, list_tests, resolve
from ejkernel_conformance.confirm.toolchain import digests, versions
from ejkernel_conformance.served import refusal_of

MOST_MAPS = 8192
"""Compiled programs hold memory maps, of which Linux gives a process 65,530."""
LONGEST_MESSAGE = 4000


class Channel:
    """The stream that messages go to. All other output goes to the standard error."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, **message: Any) -> None:
        """Writes one message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()


def main() -> None:
    """Works on conformance tests."""
    serve(_listed, _outcome)


def serve(listed: Callable[..., dict[str, Any]], outcome: Callable[[SuiteTest], tuple[str, str]]) -> None:
    """Answers requests until there are no more, or until the device no longer answers.

    Args:
        listed: What answers a request for a list, called with what the request says.
        outcome: What runs a test, and returns what became of it and a message.
    """
    channel = Channel()
    channel.send(ready=os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        if "list" in request:
            channel.send(**listed(**request["list"]))
        elif not _run(channel, [SuiteTest(*fields) for fields in request["run"]], request["until"], outcome):
            return
        _forget_programs()


def _listed(implementations: list[str], ops: list[str]) -> dict[str, Any]:
    tests = list(list_tests(tuple(implementations), tuple(ops)))
    return {
        "device": dataclasses.asdict(current_device()),
        "versions": versions(),
        "digests": digests({(test.family, test.implementation) for test in tests}),
        "tests": [dataclasses.astuple(test) for test in tests],
    }


def _run(channel: Channel, tests: list[SuiteTest], until: float, run: Callable[..., tuple[str, str]]) -> bool:
    """Runs tests until a time; returns whether the device can run more."""
    for test in tests:
        if time.time() > until:
            break
        channel.send(begin=test.id)
        started = time.monotonic()
        outcome, message = run(test)
        lost = outcome == "failed" and _is_lost()
        channel.send(end=test.id, outcome=outcome, seconds=round(time.monotonic() - started, 2), message=message)
        if lost:  # every program of this process would fail from now on
            return False
    channel.send(done=True)
    return True


def _outcome(test: SuiteTest) -> tuple[str, str]:
    try:
        function, parameter = resolve(test)
        if refusal := refusal_of(function)(parameter):
            return "refused", refusal
        function(parameter)
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - a kernel may fail in any way
        return "failed", describe_error(error)
    return "passed", ""


def describe_error(error: BaseException) -> str:
    """Returns the error in its first line, then where it came from."""
    text = f"{type(error).__name__}: {error}"
    return f"{text[:LONGEST_MESSAGE]}\n{traceback.format_exc()[-LONGEST_MESSAGE:]}"


def _is_lost() -> bool:
    """Returns whether the device no longer runs anything for this process, as after an illegal access to its memory."""
    try:
        return int(jax.block_until_ready(jnp.zeros((), jnp.int32) + 1)) != 1
    except Exception:  # noqa: BLE001 - whatever it raises, it does not run
        return True


def _forget_programs() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


if __name__ == "__main__":
    main()
