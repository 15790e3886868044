"""Records the calls that are traced, so that they can be tuned afterwards."""

import dataclasses
import warnings
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import jax

from ejkernel.ops.config.key import signature
from ejkernel.types.block_policy import BlockPolicy

MAX_RECORDED_CALLS = 4096  # distinct calls; a program with more has varying shapes, and tuning each would not pay

# Part of the key of every jitted function, so that a call compiled earlier is traced, and so recorded, again.
_policy = BlockPolicy()
_recorded_calls: dict[Hashable, "RecordedCall"] = {}


class RecordingWarning(UserWarning):
    """Calls are no longer recorded."""


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedCall:
    """One distinct call.

    Attributes:
        plan: How it was to be carried out, without the call's own configuration and the blocks around it.
        args: Its argument record, with `jax.ShapeDtypeStruct` leaves.
        mesh: With in_specs: it ran under `shard_map`.
        in_specs: Partition specs of the first arguments.
    """

    plan: Any
    args: Any
    mesh: Any = None
    in_specs: Any = None

    @property
    def tuning_identity(self) -> Hashable:
        """Returns a key that is equal for calls that share the results of tuning."""
        return self.plan, self.mesh, self.in_specs, signature(self.args)


def record_calls() -> AbstractContextManager[None]:
    """Records the calls traced inside the block; see `get_recorded` and `autotune_recorded`."""
    return _policy.block()


def record_call(plan: Any, args: Any, mesh: Any = None, in_specs: Any = None) -> None:
    """Records a call if recording is on, or if the policy would tune the call but the call is traced."""
    if not (_policy.is_on or (plan.tunes_on_miss and _leaves_fields_unset(plan.cfg))):
        return
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x)), args)
    anywhere = dataclasses.replace(plan, cfg=None, overlays=(), policy_overrides=())  # it is tuned outside of blocks
    call = RecordedCall(anywhere, abstract, mesh, in_specs)
    if len(_recorded_calls) < MAX_RECORDED_CALLS:
        _recorded_calls.setdefault(call.tuning_identity, call)
    elif call.tuning_identity not in _recorded_calls:
        message = f"{MAX_RECORDED_CALLS} distinct calls are recorded; no more will be before they are tuned or cleared"
        warnings.warn(message, RecordingWarning, stacklevel=2)


def get_recorded() -> tuple[RecordedCall, ...]:
    """Returns the distinct calls recorded so far."""
    return tuple(_recorded_calls.values())


def forget_call(call: RecordedCall) -> None:
    """Forgets one call."""
    _recorded_calls.pop(call.tuning_identity, None)


def clear_recorded() -> None:
    """Forgets the recorded calls."""
    _recorded_calls.clear()


def _leaves_fields_unset(cfg: Any) -> bool:
    """Returns whether a call's own configuration leaves something to the chain."""
    return cfg is None or cfg.part("forward") is None or cfg.part("backward") is None
