"""The results of measuring the candidates of a call."""

import dataclasses
from typing import Any

from ejkernel.ops.config.key import ConfigKey


class TunerWarning(UserWarning):
    """A call that should have been tuned could not be; it goes on with the heuristics."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One candidate: its configuration part and its median time, or why it did not run.

    Attributes:
        cfg: The configuration part.
        seconds: Median time of a call; None if the candidate did not run.
        error: Why the candidate did not run.
        spread: Interquartile range of the samples, in seconds; 0 where there is one sample or a prediction.
        samples: How many there are.
    """

    cfg: Any
    seconds: float | None
    error: str | None = None
    spread: float = 0.0
    samples: int = 0

    @property
    def part(self) -> Any:
        """Returns the configuration part."""
        return self.cfg


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The candidates of one direction of one call, fastest first; those that did not run come last.

    Attributes:
        key: The call.
        implementation: The implementation of the candidates.
        measurements: The candidates.
        kind: The kind of the calls that share its entry in a shipped table, if there are others.
        heuristic_part: What the heuristics would have taken; None without a rule.
    """

    key: ConfigKey
    implementation: str
    measurements: tuple[Measurement, ...]
    kind: str | None = None
    heuristic_part: Any = None

    @property
    def winner(self) -> Measurement:
        """Returns the candidate to use: the fastest candidate if it is faster than the heuristic's by more than the
        spread of their samples, else the heuristic's.

        Noise alone puts some candidate first. If its time cannot be told from the heuristic's, the heuristic's
        configuration stays, so that two machines of a fleet do not disagree for nothing.
        """
        of_rule = next(
            (m for m in self.measurements if m.part == self.heuristic_part and m.seconds is not None), self.fastest
        )
        assert of_rule.seconds is not None  # `next` has looked, and a tuner raises where nothing ran
        assert self.fastest.seconds is not None
        gain = of_rule.seconds - self.fastest.seconds
        return self.fastest if gain > max(of_rule.spread, self.fastest.spread) else of_rule

    @property
    def fastest(self) -> Measurement:
        """Returns the fastest candidate."""
        return self.measurements[0]
