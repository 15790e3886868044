"""Keeps the arguments and the platform that a caller passed to an operation.

Validation sees tracers alone, because it runs while JAX traces the call. These arguments say whether the caller's
arrays were tracers too. An operation that calls another one within its own call asks for the platform, and notes for
`explain` what it calls.
"""

import contextvars
from typing import Any

import jax

from ejkernel import _compat

caller_arguments: contextvars.ContextVar[Any] = contextvars.ContextVar("ejkernel_callers", default=None)
"""The argument record of the call that is being carried out; None outside of calls."""

caller_platform: contextvars.ContextVar[str] = contextvars.ContextVar("ejkernel_platform", default="auto")
"""The platform of the call that is being carried out."""

nested_call_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("ejkernel_notes", default=None)
"""The sentences about calls within the call that is being explained; None where none is."""


def was_tracer_for_caller(value: Any) -> bool:
    """Returns whether `value` was a tracer in the caller's code. In the validation, every array of an eager call is a
    tracer.
    """
    if not _compat.is_tracer(value):
        return False
    args = caller_arguments.get()
    return args is None or any(_compat.is_tracer(leaf) for leaf in jax.tree.leaves(args))
