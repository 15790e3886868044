"""The configuration chain: seven tiers are asked in order, and the first answer is the configuration of the call.

| tier | source | stored? |
|---|---|---|
| override | the call's own `cfg=` | never; it holds for that call alone |
| overlay | enclosing `overlay_cache` blocks | never |
| memory | measured, or read from the store, in this process | |
| persistent | the user's store, then the tables shipped with the backend | copied to memory |
| autotune | measured now, if the policy says so and nothing is being traced | memory and the user's store |
| heuristics | a prediction for the device, else the implementation's rule | predictions, in a store of their own |
| error | no tier that the policy allows has an answer | |

The order follows from two rules: what the caller wrote comes before what was stored, and a measurement comes before a
prediction, which comes before a rule.
"""

import dataclasses
import datetime
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ejkernel.errors import EjkernelRuntimeError, NoConfigError, TunerError
from ejkernel.ops.config import overlay
from ejkernel.ops.config.agreement import Agreement, is_explain_only
from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.config.measurement import TunerWarning, TuningResult
from ejkernel.ops.config.memory import ConfigCache
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy, effective_policy
from ejkernel.ops.config.selection import Request, Selection, foreign_part_reason, op_label
from ejkernel.ops.config.table import Entry, shipped_part
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.params import set_fields_as_text

MEASURED_TIERS = frozenset({"memory", "persistent", "autotune"})
"""The tiers whose answers were measured, on this machine or another. No other answers are stored."""


_EVENT_BY_TIER: dict[str, tuple[str, dict[str, str]]] = {
    "override": ("override", {}),
    "overlay": ("overlay_hit", {}),
    "memory": ("cache_hit", {"level": "memory"}),
    "persistent": ("cache_hit", {"level": "persistent"}),
    "heuristics": ("heuristics", {}),
}


class TunerMethods(Protocol):
    """The methods of a tuner that a chain calls."""

    def tune(self, request: Request, kernel_argument: Any) -> TuningResult:
        """Measures the candidates of one direction of a call."""
        ...


class ConfigSelectorChain:
    """Asks the tiers in order and returns the first answer.

    Args:
        cache: Memory tier.
        policy: What to do when no tier before autotune has a configuration.
        tuner: Measures candidates; None creates one with the defaults when it is needed.
        persistent: The user's store; None reads and writes no files.
        persist_autotune: Whether measurements are written to the store.
        on_event: Called as `(event, operation, **details)` for every event of the chain: `"override"`, `"overlay_hit"`,
            `"cache_hit"` with a `level`, `"autotune_start"`, `"autotune_finish"`, `"heuristics"`, `"error"`. Not
            called by `explain`.
        forbid_reautotune: Whether measuring a call a second time is an error.
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: TunerMethods | None = None,
        persistent: PersistentCache | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., None] | None = None,
        forbid_reautotune: bool = False,
    ) -> None:
        self.cache = ConfigCache() if cache is None else cache
        self.policy = AutotunePolicy() if policy is None else policy
        self.tuner = tuner
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        self.on_event = on_event
        self.forbid_reautotune = forbid_reautotune
        self._measured_keys: set[ConfigKey] = set()
        self._agreement = Agreement()
        self._untunable: dict[ConfigKey, str] = {}
        self._predictions: dict[ConfigKey, Any] = {}

    def choose(self, request: Request, argument: Any = None) -> Selection:
        """Returns the configuration of one direction of a call.

        Args:
            request: The call.
            argument: Argument of the implementation's function to measure with: a concrete record or `Pullback`. None
                under a trace.

        Raises:
            NoConfigError: No tier that the policy allows has an answer.
            AgreementError: Process 0 of the job has no configuration, or has not run this call.
        """
        trail: list[str] = []
        # The configuration that the caller wrote wins under every policy. It holds for this call alone, so it is not
        # stored: another call of these shapes must not inherit it.
        explicit = self._select_override_or_overlay(request, trail)
        if explicit is not None:
            self._report_selection(explicit, request)
            return explicit
        if request.batch_invariant:
            selection = _select_for_any_batch(request, trail)
            self._report_selection(selection, request)
            return selection
        key = request.key()
        if is_explain_only():  # `explain` must not measure, store, or wait for other processes
            return self._agreement.known_decision(key) or self._select_from_later_tiers(key, request, None, trail)

        def propose() -> Selection:
            return self._select_from_later_tiers(key, request, argument, trail)

        # Process 0 decides for all processes of a job: they must compile the same program, or their collectives hang.
        selection = self._agreement.decide(key, request.part_type(), propose, restart_agreement=argument is not None)
        self._cache_if_measured(key, selection)
        self.cache.note_selected_part(key, selection.part)
        self._report_selection(selection, request)
        return selection

    def report_event(self, name: str, operation: str, **details: Any) -> None:
        """Reports an event to `on_event`."""
        if self.on_event is not None and not is_explain_only():
            self.on_event(name, operation, **details)

    def _report_selection(self, selection: Selection, request: Request) -> None:
        """Reports the tier of an answer; a measurement was reported when it ended."""
        name, details = _EVENT_BY_TIER.get(selection.tier, (None, {}))
        if name is not None:
            self.report_event(name, request.op.name, direction=request.direction, **details)

    def tune(
        self, request: Request, make_kernel_argument: Callable[[], Any], *, predicted: bool = False
    ) -> TuningResult | None:
        """Measures a call, even if a tier already has a configuration, and stores the fastest candidate.

        Args:
            request: The call.
            make_kernel_argument: Returns the argument of the implementation's function.
            predicted: Whether the tuner predicts times instead of measuring them. Predictions have a store
                of their own, and replace the rule only.

        Returns:
            The measurements; None in the processes of a job that take the result of process 0.

        Raises:
            TunerError: The policy does not allow measuring, or no candidate ran.
        """
        if request.batch_invariant:
            raise TunerError("a batch_invariant block has fixed configurations: measure outside of it")
        if not effective_policy(self.policy, self).allow_autotune:
            raise TunerError(f"the policy does not allow measuring {request.op.name}: allow_autotune is False")
        key, results = request.key(), list[TuningResult]()

        def propose() -> Selection:
            results.append(self._measure_candidates(request, make_kernel_argument(), predicted))
            if predicted:
                return Selection(results[0].winner.part, "heuristics", ("heuristics: predicted on request",))
            return Selection(results[0].winner.part, "autotune", ("autotune: measured on request",))

        self._cache_if_measured(key, self._agreement.decide(key, request.part_type(), propose, restart_agreement=True))
        return results[0] if results else None

    def has_stored_config(self, request: Request) -> bool:
        """Returns whether a tier before autotune has a configuration."""
        return (
            self._select_override_or_overlay(request, []) is not None
            or self._select_stored(request.key(), request, []) is not None
        )

    def store(
        self,
        key: ConfigKey,
        part: Any,
        seconds: float,
        measured_at: str,
        *,
        spread: float = 0.0,
        samples: int = 0,
    ) -> None:
        """Stores a measured configuration in memory and in the user's store. Only measurements are stored there."""
        self.cache.put(key, part)
        if self.persistent is not None and self.persist_autotune:
            self.persistent.put(key, part, seconds, measured_at, spread=spread, samples=samples)

    def _store_prediction(self, key: ConfigKey, part: Any, seconds: float, predicted_at: str) -> None:
        """Stores a predicted configuration, in another file than measurements."""
        self._predictions[key] = part
        if self.persistent is not None and self.persist_autotune:
            config = msgspec.to_builtins(part)
            self.persistent.predicted.update({str(key): Entry(config, seconds, predicted_at, predicted=True)})

    def _cache_if_measured(self, key: ConfigKey, selection: Selection) -> None:
        # The answer of a rule is not stored: it would hide the answer of a later version of the rule.
        if selection.tier in MEASURED_TIERS:
            self.cache.put(key, selection.part)

    def _select_override_or_overlay(self, request: Request, trail: list[str]) -> Selection | None:
        cfg = request.override
        part = None if cfg is None else cfg.part_of(request.direction)
        if cfg is not None and part is not None:
            elsewhere = overlay.setting_mismatch(cfg, request.platform_and_backend())
            remark = f" ({elsewhere})" if elsewhere else ""
            if request.direction == "both" and cfg.part("backward") not in (None, part):
                remark += f" (its backward part has no meaning for {request.implementation.name}, which is paired)"
            trail.append(
                f"override: cfg= gives {set_fields_as_text(part)}{remark}{_remark_on_unread_fields(part, request)}"
            )
            return Selection(request.complete_with_heuristic(part), "override", tuple(trail))
        trail.append("override: no cfg=" if cfg is None else f"override: cfg= leaves the {request.direction} open")
        part, remark = (
            overlay.find_overlay_part(request.key(), request.platform_and_backend())
            if overlay.overlays()
            else (None, "none active")
        )
        foreign = (
            None if part is None else foreign_part_reason(request.op, request.implementation, part, request.direction)
        )
        if foreign:
            part, remark = None, f"skipped, {foreign}"
        if part is not None:
            trail.append(f"overlay: {remark} gives {set_fields_as_text(part)}{_remark_on_unread_fields(part, request)}")
            return Selection(request.complete_with_heuristic(part), "overlay", tuple(trail))
        trail.append(f"overlay: {remark}")
        return None

    def _select_from_later_tiers(self, key: ConfigKey, request: Request, argument: Any, trail: list[str]) -> Selection:
        """Returns the answer of the first tier after `cfg=` and overlays that has one.

        A stored measurement comes before a new one, which takes seconds. Both come before a rule, which is a guess.
        """
        return (
            self._select_stored(key, request, trail)
            or self._select_tuned(key, request, argument, trail)
            or self._select_by_heuristic(key, request, trail)
        )

    def _select_stored(self, key: ConfigKey, request: Request, trail: list[str]) -> Selection | None:
        part = self.cache.get(key)
        if part is not None:
            return Selection(part, "memory", (*trail, "memory: hit"))
        trail.append("memory: no entry")
        part = self.persistent.get(key, request.part_type()) if self.persistent is not None else None
        source = "user store"
        if part is None:
            part, source = _shipped_config_part(key, request)
        if part is None:
            trail.append("persistent: no entry in the user store or a shipped table")
            return None
        return Selection(request.complete_with_heuristic(part), "persistent", (*trail, f"persistent: {source}"))

    def _select_tuned(self, key: ConfigKey, request: Request, argument: Any, trail: list[str]) -> Selection | None:
        policy = effective_policy(self.policy, self)
        if not policy.allow_autotune:
            trail.append("autotune: not allowed by the policy")
        elif not policy.tunes_on_miss:
            trail.append("autotune: not tried, cache_miss_fallback of the policy is 'heuristics'")
        elif request.direction == "backward" and not policy.validate_backward:
            trail.append("autotune: the policy measures forward passes alone")
        elif key in self._untunable:
            trail.append(f"autotune: failed earlier, {self._untunable[key]}")
        elif argument is None and is_explain_only():
            trail.append("autotune: on, and not tried here: an eager call is measured, a traced one cannot be")
        elif argument is None:
            # Under a trace nothing runs that could be timed. The call was recorded and can be tuned afterwards.
            trail.append("autotune: on, but a traced call cannot be measured; tune the call eagerly or offline")
        else:
            try:
                part = self._measure_candidates(request, argument).winner.part
                return Selection(part, "autotune", (*trail, "autotune: measured now"))
            except TunerError as error:
                # Remembered, so that a training loop does not try the same measurement again at every step.
                self._untunable[key] = str(error)
                warnings.warn(f"{request.op.name} is not tuned: {error}", TunerWarning, stacklevel=2)
                trail.append(f"autotune: failed, {error}")
        return None

    def _measure_candidates(self, request: Request, argument: Any, predicted: bool = False) -> TuningResult:
        if self.forbid_reautotune and request.key() in self._measured_keys:
            raise EjkernelRuntimeError(f"forbid_reautotune: got True, and {request.key()} was measured already")
        self.report_event("autotune_start", request.op.name, direction=request.direction)
        result = (self.tuner or Tuner()).tune(request, argument)
        winner, now = result.winner, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        assert winner.seconds is not None  # a tuner raises if no candidate ran
        if predicted:
            self._store_prediction(result.key, winner.part, winner.seconds, now)
        else:
            spread, samples = winner.spread, winner.samples
            self.store(result.key, winner.part, winner.seconds, now, spread=spread, samples=samples)
        self._measured_keys.add(result.key)
        self.report_event("autotune_finish", request.op.name, direction=request.direction, part=winner.part)
        self._untunable.pop(result.key, None)
        return result

    def _select_by_heuristic(self, key: ConfigKey, request: Request, trail: list[str]) -> Selection:
        if not effective_policy(self.policy, self).allow_heuristics:
            if is_explain_only():
                return _no_selection(effective_policy(self.policy, self), trail)
            self.report_event("error", request.op.name, direction=request.direction)
            steps = "\n  ".join((*trail, "heuristics: not allowed by the policy"))
            raise NoConfigError(f"no configuration for {key}\n  {steps}")
        part, source = self._predicted_part(key, request)
        if part is None:
            return Selection(request.heuristic(), "heuristics", (*trail, "heuristics: the implementation's rule"))
        step = f"heuristics: predicted and not measured, {source}"
        return Selection(request.complete_with_heuristic(part), "heuristics", (*trail, step))

    def _predicted_part(self, key: ConfigKey, request: Request) -> tuple[Any | None, str]:
        """Returns the configuration that was predicted to be fastest, and where the prediction is stored."""
        if key in self._predictions:
            return self._predictions[key], "in this process"
        part = self.persistent.predicted.get(key, request.part_type()) if self.persistent is not None else None
        return (part, "user store") if part is not None else _shipped_config_part(key, request, predicted=True)


def _select_for_any_batch(request: Request, trail: list[str]) -> Selection:
    """Returns the configuration of a call in a `batch_invariant` block for which neither `cfg=` nor an overlay has one.

    Measurements and predictions depend on the sizes of one batch, so they are not used, whatever the policy.
    """
    steps = ("heuristics: the implementation's rule for batch_invariant blocks; measurements are of one batch",)
    return Selection(request.heuristic(), "heuristics", (*trail, *steps))


def _no_selection(policy: AutotunePolicy, trail: list[str]) -> Selection:
    """Returns the answer of the last tier to `explain`; a call raises a `NoConfigError` instead."""
    outcome = "an eager call measures one, a traced call fails" if policy.tunes_on_miss else "the call fails"
    steps = ("heuristics: not allowed by the policy", f"error: no tier has a configuration: {outcome}")
    return Selection(None, "error", (*trail, *steps))


def _shipped_config_part(key: ConfigKey, request: Request, predicted: bool = False) -> tuple[Any | None, str]:
    """Returns the entry of a shipped table, and the name of the table.

    A kernel gets a record and does not know the operation, so a measurement holds for all operations of the family.
    """
    tuned, kind, part_type = request.implementation.tuned, request.kind(), request.part_type()
    for op in request.operations_of_family():
        part = shipped_part(tuned, op.name, dataclasses.replace(key, op=op_label(op)), part_type, kind, predicted)
        if part is not None:
            return part, "shipped table" if op is request.op else f"shipped table of {op.name}"
    return None, "shipped table"


def _remark_on_unread_fields(part: Any, request: Request) -> str:
    """Returns a remark on fields that are set and that the chosen kernel does not read."""
    implementation = request.implementation
    unread = implementation.config.unread_fields(part, request.direction)
    return f" ({', '.join(unread)}: no effect, {implementation.name} does not read it)" if unread else ""


__all__ = ["ConfigSelectorChain", "NoConfigError", "Request", "Selection"]
