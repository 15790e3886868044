"""The shared body and the shared documentation of the public functions of operations."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ejkernel.ops.call import call
from ejkernel.ops.model import CALL_OPTIONS, Op
from ejkernel.promotion import standard_promotion

Function = TypeVar("Function", bound=Callable[..., Any])

CALL_OPTIONS_DOC = """
    platform: `"triton"`, `"pallas"`, `"cuda"`, `"xla"` or `"auto"`. An explicit one is never replaced.
    cfg: Configuration for this call alone; changes speed, not results.
    mesh: With `in_specs` and `out_specs`: run under `shard_map`, with the meaning of the unsharded call.
    in_specs: Partition specs of the positional arguments, in order. Trailing ones may be left out and then follow from
        the others, as does a None.
    out_specs: Partition specs of the results, in order; those after the first may be left out. Must follow from the
        inputs'.
"""
"""The documentation of the call options in every operation's docstring."""
ERRORS_DOC = """
Raises:
    ValueError: A shape, dtype or value is wrong; the message names the argument.
    NoImplementationError: No backend serves the call; the message is the table of reasons.
"""
"""The errors of every operation; its docstring has those of its own."""


def run_operation(op: Op, arguments: dict[str, Any]) -> Any:
    """Carries out a call of an operation's public function: makes the argument record and goes through the engine.

    Args:
        op: The operation.
        arguments: All arguments of the function by name, call options included: `locals()` as the first statement of
            its body.

    Raises:
        ValueError: The call is wrong.
        NoImplementationError: No implementation serves it.
    """
    options = {name: arguments.pop(name, None) for name in CALL_OPTIONS}
    with standard_promotion():
        return call(op, op.arguments(**arguments), **options)


def document_options(function: Function) -> Function:
    """Completes the docstring of an operation's public function with what all operations share: the call options and
    the errors.
    """
    function.__doc__ = complete_docstring(function.__doc__)
    return function


def complete_docstring(docstring: str | None) -> str | None:
    """Returns the docstring of a declaration with the call options after its own arguments, and the errors of every
    operation before its own.

    Raises:
        ValueError: The docstring has no section of arguments or no section of results, or it documents a call option
            itself.
    """
    if docstring is None:  # python -OO
        return None
    text = inspect.cleandoc(docstring)
    arguments, separator, results = text.partition("\n\nReturns:\n")
    documented = [line.strip().partition(":")[0] for line in arguments.splitlines()]
    repeated = [name for name in CALL_OPTIONS if name in documented]
    if not separator or "\nArgs:\n" not in arguments or repeated:
        raise ValueError(f"docstring: got {'again ' + ', '.join(repeated) if repeated else 'none of'} Args and Returns")
    declared_errors, example = "\nRaises:\n", "\n\nExample:\n"
    if declared_errors in results:
        results = results.replace(declared_errors, ERRORS_DOC, 1)
    else:
        results, head, code = results.partition(example)
        results = f"{results.rstrip()}\n{ERRORS_DOC.rstrip()}{head}{code}"
    return arguments + CALL_OPTIONS_DOC.rstrip() + separator + results
