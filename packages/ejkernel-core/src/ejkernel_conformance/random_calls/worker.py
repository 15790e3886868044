"""A process that runs programs, for `ejkernel_conformance.confirm.runner`."""

import dataclasses
import functools
import json
from typing import Any

from ejkernel.ops.device import current_device
from ejkernel_conformance.confirm.listing import SuiteTest
from ejkernel_conformance.confirm.toolchain import versions
from ejkernel_conformance.confirm.worker import describe_error, serve
from ejkernel_conformance.random_calls.comparing import WrongError, compare
from ejkernel_conformance.random_calls.programs import DRAWN, make_program


def _listed(ops: list[str], seed: int, programs: int) -> dict[str, Any]:
    """Returns the programs of a run: a total number, spread evenly over the operations."""
    chosen = ops or list(DRAWN)
    names = [f"{seed}:{chosen[n % len(chosen)]}:{n // len(chosen)}" for n in range(programs)]
    tests = [SuiteTest(name, "", "default", name.split(":")[1], name) for name in names]
    return {
        "device": dataclasses.asdict(current_device()),
        "versions": versions(),
        "digests": {},
        "tests": [dataclasses.astuple(test) for test in tests],
    }


def _outcome(test: SuiteTest, values: int) -> tuple[str, str]:
    """Returns what became of a program; the message is JSON where its calls are right."""
    try:
        return "passed", json.dumps(compare(make_program(test.id), values))
    except WrongError as error:
        return "failed", str(error)
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way
        return "failed", describe_error(error)


if __name__ == "__main__":
    serve(_listed, functools.partial(_outcome, values=6))
