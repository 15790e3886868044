"""What measuring gives."""

import dataclasses
from typing import Any

from ejkernel.ops.config.key import ConfigKey


class TunerError(RuntimeError):
    """Nothing could be measured."""


class TunerWarning(UserWarning):
    """A call that should have been tuned could not be; it goes on with the heuristics."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One candidate: its configuration part and its median time, or why it did not run."""

    part: Any
    seconds: float | None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The candidates of one direction of one call, fastest first; those that did not run come last.

    `kind` is what the call has in common with those that share its entry in a shipped table, if there are others.
    """

    key: ConfigKey
    implementation: str
    measurements: tuple[Measurement, ...]
    kind: str | None = None

    @property
    def best(self) -> Measurement:
        """The fastest candidate."""
        return self.measurements[0]
