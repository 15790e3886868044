"""Tunes without a TPU: orders the candidates of an implementation by the predicted time of their kernels."""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from ejkernel.errors import TunerError
from ejkernel.ops.config.chain import Request, TunerMethods
from ejkernel.ops.config.measurement import Measurement, TuningResult
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.execution.target import Target
from ejkernel.ops.model import load_object
from ejkernel.types.pullback import run_both_passes
from ejkernel_pallas.tpu.profile.cases import Case, Workload
from ejkernel_pallas.tpu.profile.chips import CHIPS
from ejkernel_pallas.tpu.profile.jobs import LIBTPU_MISSING_MESSAGE, profile_many
from ejkernel_pallas.tpu.profile.report import Report


def targets() -> Mapping[str, Target]:
    """Returns the chips as targets of `ejkernel tune --target`."""
    return {name: _make_target(name) for name in CHIPS}


def _make_target(name: str) -> Target:
    def make_tuner(show_progress: bool) -> TunerMethods:
        if importlib.util.find_spec("libtpu") is None:
            raise TunerError(LIBTPU_MISSING_MESSAGE)
        return ProfileTuner(target=name, show_progress=show_progress)

    device = DeviceInfo(platform="tpu", vendor="google", kind=CHIPS[name].kind)
    return Target(device=device, tuner=make_tuner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileTuner:
    """Compiles candidates for a chip in one worker process, one after another, and predicts their kernels' time.

    Attributes:
        target: Name of the chip.
        show_progress: Whether to show a progress bar.
    """

    target: str
    show_progress: bool = False

    def tune(self, request: Request, kernel_argument: Any) -> TuningResult:
        """Predicts the time of every candidate of an implementation, for one direction of a call or for both passes
        of a pair.

        Args:
            request: The tuning request; its device is the chip.
            kernel_argument: Record or `Pullback`: shapes, and values if these decide what the kernels do.

        Raises:
            TunerError: No candidate has a prediction; the message gives each candidate's error.
        """
        implementation, direction = request.implementation, request.direction
        path = implementation.backward if direction == "backward" else implementation.forward
        parts = implementation.config.candidates(request.record, request.device, direction)
        unique = tuple(dict.fromkeys((request.heuristic(), *parts)))
        label = f"{request.op.name} {direction} {implementation.name}"
        backward_path = implementation.backward if direction == "both" else None
        kwargs = {"path": path, "backward_path": backward_path, "record_or_pullback": kernel_argument}
        cases = [
            Case(label=f"{label} {part}", build=f"{__name__}:workload", kwargs={**kwargs, "config": part})
            for part in unique
        ]
        measured = [
            _measurement_of_report(*pair) for pair in zip(unique, self._profile_cases(cases, label), strict=True)
        ]
        ranked = sorted(measured, key=lambda m: float("inf") if m.seconds is None else m.seconds)
        if ranked[0].seconds is None:
            lines = (f"{m.part}: {m.error}" for m in ranked)
            raise TunerError("\n  ".join([f"no candidate of {label} can be predicted for {self.target}:", *lines]))
        return TuningResult(request.key(), implementation.name, tuple(ranked), request.kind(), request.heuristic())

    def _profile_cases(self, cases: list[Case], label: str) -> list[Report]:
        if not self.show_progress:
            return profile_many(cases, target=self.target)
        import tqdm

        with tqdm.tqdm(total=len(cases), desc=f"{label} for {self.target}", unit="config") as bar:

            def advance_progress_bar(report: Report) -> None:
                bar.update()

            return profile_many(cases, target=self.target, on_report=advance_progress_bar)


def workload(path: str, record_or_pullback: Any, config: Any, backward_path: str | None = None) -> Workload:
    """Builds one direction of an implementation with a configuration, or both if `backward_path` names the backward
    function, too.
    """
    kernel = load_object(path)
    if backward_path is not None:
        kernel = functools.partial(run_both_passes, kernel, load_object(backward_path))
    return Workload(function=lambda argument: kernel(argument, config), args=(record_or_pullback,))


def _measurement_of_report(config: Any, report: Report) -> Measurement:
    error = report.error or _reason_unusable(report)
    return Measurement(config, None if error else report.seconds, error)


def _reason_unusable(report: Report) -> str | None:
    """Returns why a profile cannot be used as a prediction; None if it can."""
    if not report.kernels:
        return "it has no TPU kernels, and only these can be predicted"
    unknown = sorted({name for kernel in report.kernels for name in kernel.simulation.unknown_reads})
    if unknown:
        return f"its schedule depends on values that are not known: {', '.join(unknown)}"
    if not all(kernel.simulation.is_complete for kernel in report.kernels):
        return "simulating it takes too long"
    return None
