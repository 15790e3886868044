"""The errors of the library that a caller may want to catch by name."""

from typing import Any

__all__ = ["AgreementError", "EjkernelRuntimeError", "NoConfigError", "NoImplementationError", "TunerError"]


class EjkernelRuntimeError(RuntimeError):
    """The call is valid but cannot run here: no kernel serves it, or no configuration is allowed."""


class NoImplementationError(EjkernelRuntimeError, NotImplementedError):
    """No implementation can serve a call; the message is the table of verdicts.

    Attributes:
        choice: The table, as an `ejkernel.ops.Choice`.
    """

    def __init__(self, choice: Any) -> None:
        self.choice = choice
        super().__init__(f"no implementation serves this call\n{choice}")


class NoConfigError(EjkernelRuntimeError):
    """No tier that the policy allows has a configuration."""


class TunerError(RuntimeError):
    """No candidate could be measured."""


class AgreementError(RuntimeError):
    """Process 0 did not decide: it has not made the same call in time, or the call failed there."""
