"""Explains what a call would do."""

import dataclasses
from typing import Any

from ejkernel.ops.call import decide
from ejkernel.ops.config.agreement import explain_only
from ejkernel.ops.dispatch import Decision
from ejkernel.ops.plugins import registry


def explain(operation: Any, *args: Any, **kwargs: Any) -> Decision:
    """Returns which implementation and configuration a call would use, and why; runs and measures nothing.

    Args:
        operation: The public function, its Kernel class, or its name.
        *args: Positional arguments of the call; arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: Keyword arguments, call options included.

    Returns:
        The verdict on every registered implementation for the forward and the backward pass, the plugins that did
        not load, and the tier of the configuration chain that answered; and what the call means where libraries differ,
        such as how many keys a window keeps. Printing it gives a table.

    Raises:
        ValueError: The call is wrong on every backend.
    """
    op = registry().op(operation)
    record, options = op.bind(args, kwargs)
    with explain_only():
        decision = decide(op, record, **options)
    sentences = () if op.conventions is None else tuple(op.conventions(record))
    return dataclasses.replace(decision, conventions=sentences)
