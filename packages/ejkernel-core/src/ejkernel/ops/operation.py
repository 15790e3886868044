"""Public functions of operations: declared by their signature and docstring alone, and carried out in one place."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, cast

from ejkernel.ops.call import call
from ejkernel.ops.model import CALL_OPTIONS, Op
from ejkernel.promotion import standard_promotion

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = """
    platform: `"triton"`, `"pallas"`, `"cuda"`, `"xla"` or `"auto"`. An explicit one is never replaced.
    cfg: Configuration for this call alone; changes speed, not results.
    mesh: With `in_specs` and `out_specs`: run under `shard_map`, with the meaning of the unsharded call.
    in_specs: Partition specs of the positional arguments, in order. Trailing ones may be left out and then follow from
        the others, as does a None.
    out_specs: Partition specs of the results, in order; those behind the first may be left out. Must follow from the
        inputs'.
"""
"""What every operation's docstring says of its call options."""


def operation(op: Callable[[], Op]) -> Callable[[Function], Function]:
    """Makes a declaration the public function of an operation.

    The body of the declaration is `...`. Its signature is the contract: argument names are those of the argument
    record, and the five call options come last. Its docstring documents the arguments of the record; those of the
    options are put behind them, from `OPTIONS`. A module named as its operation can be called as the function.

    Args:
        op: Returns the operation, which is declared after the function.
    """

    def declare(function: Function) -> Function:
        run = functools.wraps(function)(_binding(function, op))
        run.__doc__ = complete_docstring(function.__doc__)
        home = sys.modules.get(function.__module__)
        if home is not None and type(home) is ModuleType and home.__name__.rpartition(".")[2] == function.__name__:
            home.__class__ = _CallableModule
        return cast(Function, run)

    return declare


class _CallableModule(ModuleType):
    """The module of an operation of the same name, which can be called as its function.

    A package has one attribute for the module and for the function; with this it is both, whichever was imported first.
    """

    @property
    def _function(self) -> Callable[..., Any]:
        return self.__dict__[self.__name__.rpartition(".")[2]]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def op(self) -> Op:
        """What `explain` looks for."""
        return self.__dict__["OP"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _binding(function: Callable[..., Any], op: Callable[[], Op]) -> Any:
    """A function with the same parameters and defaults that makes the argument record and calls the operation.

    Its source is put together, as that of a dataclass's `__init__` is: binding by `inspect` would cost an eager call
    more than all else that happens before its compiled function runs.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters]
    positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    fields = ", ".join(f"{name}={name}" for name in names if name not in CALL_OPTIONS)
    options = ", ".join(f"{name}={name}" for name in CALL_OPTIONS)
    source = (
        f"def run({', '.join([*names[:positional], '*', *names[positional:]])}):\n"
        f"    op = declared()\n"
        f"    with standard_promotion():\n"
        f"        return call(op, op.arguments({fields}), {options})\n"
    )
    scope: dict[str, Any] = {"declared": op, "call": call, "standard_promotion": standard_promotion}
    exec(compile(source, f"<call of {function.__name__}>", "exec"), scope)
    run = scope["run"]
    run.__defaults__, run.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return run


def complete_docstring(docstring: str | None) -> str | None:
    """The docstring of a declaration with the call options behind its own arguments.

    Raises:
        ValueError: It has no arguments or no results to put them between, or documents a call option itself.
    """
    if docstring is None:  # python -OO
        return None
    text = inspect.cleandoc(docstring)
    arguments, found, results = text.partition("\n\nReturns:\n")
    documented = [line.strip().partition(":")[0] for line in arguments.splitlines()]
    again = [name for name in CALL_OPTIONS if name in documented]
    if not found or "\nArgs:\n" not in arguments or again:
        raise ValueError(f"docstring: got {'again ' + ', '.join(again) if again else 'none of'} Args and Returns")
    return arguments + OPTIONS.rstrip() + found + results
