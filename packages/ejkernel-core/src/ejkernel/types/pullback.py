"""The results of a forward pass that the backward pass gets."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from ejkernel.types.arguments import arguments, static


class ForwardResults(NamedTuple):
    """The results of a forward implementation.

    Attributes:
        output: The family's output.
        residuals: The family's residuals, which any backward implementation of the family can use.
        private_residuals: Any tree of arrays, which only the backward function of the same implementation gets. Only a
            paired implementation may return it; None for nothing.
    """

    output: Any
    residuals: Any
    private_residuals: Any = None


@arguments
class Pullback:
    """The pieces of one backward pass.

    Attributes:
        record: The forward record, as the forward implementation got it.
        residuals: The family's residuals of the forward pass.
        output: The forward output.
        cotangent: Cotangent of the output; same structure, shapes and dtypes. None until the backward pass runs.
        grad_fields: Names of the record fields whose gradient is asked for. A backward implementation returns
            `{name: gradient}` for at least these, each with the field's shape and dtype.
        private_residuals: What the forward function of the same, paired implementation returned after its residuals;
            None where it returned nothing more.
        lse_cotangent: Cotangent of the residuals' lse, where the call returned it; None for zero. Only an
            implementation whose `Requires.handles` has `"lse_cotangent"` is given one.
    """

    record: Any
    residuals: Any
    output: Any
    cotangent: Any
    grad_fields: frozenset[str] = static()
    private_residuals: Any = None
    lse_cotangent: Any = None


_is_tracing_differentiated_call: contextvars.ContextVar[bool] = contextvars.ContextVar("differentiating", default=False)


@contextlib.contextmanager
def tracing_differentiated_call() -> Generator[None]:
    """Tells the forward implementations that are traced in the block that a backward pass follows."""
    token = _is_tracing_differentiated_call.set(True)
    try:
        yield
    finally:
        _is_tracing_differentiated_call.reset(token)


def is_differentiated() -> bool:
    """Returns whether a backward pass follows the forward pass that is traced: what it is given need
    not be made again.
    """
    return _is_tracing_differentiated_call.get()


def run_both_passes(
    forward: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any], start: Pullback, config: Any
) -> Any:
    """Returns the output and the requested gradients of an implementation's two passes with one configuration.

    Args:
        forward: The forward function.
        backward: The backward function.
        start: Record, cotangent and requested fields. Without requested fields, the forward pass runs alone.
        config: The configuration of both.
    """
    if not start.grad_fields:
        return ForwardResults(*forward(start.record, config)).output
    with tracing_differentiated_call():
        results = ForwardResults(*forward(start.record, config))
    gradients = backward(dataclasses.replace(start, **results._asdict()), config)
    return results.output, {name: gradients[name] for name in start.grad_fields}
