"""Keeps the arguments that a caller passed to an operation.

Validation sees tracers alone, because it runs while JAX traces the call. These arguments say whether the caller's
arrays were tracers too.
"""

import contextvars
from typing import Any

import jax

from ejkernel import _compat

caller_arguments: contextvars.ContextVar[Any] = contextvars.ContextVar("ejkernel_callers", default=None)
"""The argument record of the call that is being carried out; None outside of calls."""


def was_tracer_for_caller(value: Any) -> bool:
    """Returns whether `value` was a tracer in the caller's code. In the validation, every array of an eager call is a
    tracer.
    """
    if not _compat.is_tracer(value):
        return False
    args = caller_arguments.get()
    return args is None or any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(args))
