"""What the chain may do on a miss."""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any, Literal

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotunePolicy:
    """What happens when no tier knows a call.

    Attributes:
        allow_autotune: Whether measuring is allowed at all.
        allow_heuristics: Whether rules may decide; if not, a miss is an error.
        cache_miss_fallback: Which of the two is asked first on a miss. Heuristics follow where tuning cannot run
            (under a trace) or finds no working candidate.
        validate_backward: Whether a miss of a backward pass may lead to measuring too.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Literal["heuristics", "autotune"] = "heuristics"
    validate_backward: bool = True

    def __post_init__(self) -> None:
        for name in ("allow_autotune", "allow_heuristics", "validate_backward"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wants True or False")
        if self.cache_miss_fallback not in ("heuristics", "autotune"):
            raise ValueError(f"cache_miss_fallback: got {self.cache_miss_fallback!r}, wants 'heuristics' or 'autotune'")

    @property
    def tunes_on_miss(self) -> bool:
        """Whether a miss leads to measuring."""
        return self.allow_autotune and self.cache_miss_fallback == "autotune"


# Part of the key of every jitted function. Made at import: a context that joins later makes JAX compile everything
# again, and making one is not thread-safe. It touches no device.
_override: Any = jax.make_user_context(())


def override_updates() -> tuple[tuple[str, Any], ...]:
    """The fields that enclosing `policy_override` blocks replace, as ordered pairs."""
    return _override.value


def effective(policy: AutotunePolicy) -> AutotunePolicy:
    """`policy` with the enclosing `policy_override` blocks applied."""
    updates = override_updates()
    return dataclasses.replace(policy, **dict(updates)) if updates else policy


@contextlib.contextmanager
def policy_override(**updates: Any) -> Generator[None]:
    """Replaces policy fields for the calls traced inside the block, on this thread; part of the jit cache key.

    Args:
        **updates: Fields of `AutotunePolicy`; those not named keep what enclosing blocks, or the chain, say.

    Raises:
        ValueError: A name is not a field of `AutotunePolicy`, or a value is not one of the field's.
    """
    unknown = sorted(set(updates) - {f.name for f in dataclasses.fields(AutotunePolicy)})
    if unknown:
        raise ValueError(f"policy_override: AutotunePolicy has no field {', '.join(unknown)}")
    effective_updates = dict(override_updates()) | updates
    AutotunePolicy(**effective_updates)  # a wrong value fails here, not at some later call
    with _override(tuple(sorted(effective_updates.items()))):
        yield


def forward_autotune_only() -> contextlib.AbstractContextManager[None]:
    """A block in which no backward pass is measured on a miss: `policy_override(validate_backward=False)`."""
    return policy_override(validate_backward=False)
