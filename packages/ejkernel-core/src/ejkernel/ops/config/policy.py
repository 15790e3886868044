"""The policy: what the chain does for a call without a configuration."""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any, Literal, Protocol

import jax


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """The policy for a call that no earlier tier has a configuration for.

    Attributes:
        allow_autotune: Whether measuring is allowed at all.
        allow_heuristics: Whether heuristics may decide; if not, a call without a configuration is an error.
        cache_miss_fallback: Whether autotuning or heuristics are asked first. Heuristics follow where tuning cannot run
            (under a trace) or finds no working candidate.
        validate_backward: Whether backward passes may be measured too.
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
        """Returns whether a call without a configuration is measured."""
        return self.allow_autotune and self.cache_miss_fallback == "autotune"


_PolicyUpdate = tuple[int | None, str, Any]
"""Whose policy, by the chain's `id`; None for every chain's; a field, and its value."""

# Part of the key of every jitted function. Made at import: a context that joins later makes JAX compile everything
# again, and making one is not thread-safe. It touches no device.
_override_context: Any = jax.make_user_context(())


def active_policy_overrides() -> tuple[_PolicyUpdate, ...]:
    """Returns what enclosing `policy_override` blocks replace, those of every chain first."""
    return _override_context.value


def restored_policy_overrides(overrides: tuple[_PolicyUpdate, ...]) -> contextlib.AbstractContextManager[None]:
    """Returns a block in which the given replacements hold, and no others."""
    return _override_context(overrides)


class HasPolicy(Protocol):
    """A chain."""

    policy: AutotunePolicy


def effective_policy(policy: AutotunePolicy, chain: HasPolicy | None = None) -> AutotunePolicy:
    """Returns `policy` with the enclosing `policy_override` blocks applied: the blocks for every chain and the blocks
    for this chain.
    """
    updates = {name: value for owner, name, value in active_policy_overrides() if owner in (None, id(chain))}
    return dataclasses.replace(policy, **updates) if updates else policy


@contextlib.contextmanager
def policy_override(selector: HasPolicy | None = None, **updates: Any) -> Generator[None]:
    """Replaces policy fields for the calls traced inside the block, on this thread; part of the jit cache key.

    Args:
        selector: The chain whose calls are meant; None for all.
        **updates: Fields of `AutotunePolicy`; those not named keep what enclosing blocks, or the chain, say.

    Raises:
        ValueError: `selector` is no chain, a name is not a field of `AutotunePolicy`, or a value is not one of the
            field's.
    """
    if selector is not None and not isinstance(getattr(selector, "policy", None), AutotunePolicy):
        raise ValueError(f"selector: got {type(selector).__name__}, wants a ConfigSelectorChain, or None for all")
    unknown = sorted(set(updates) - {f.name for f in dataclasses.fields(AutotunePolicy)})
    if unknown:
        raise ValueError(f"policy_override: AutotunePolicy has no field {', '.join(unknown)}")
    AutotunePolicy(**updates)  # a wrong value fails here, not at some later call
    owner = None if selector is None else id(selector)
    # Entries that this block overrides are removed. Then each owner has a field once, the order has no meaning, and
    # blocks with the same effect have the same jit key.
    entries = [each for each in active_policy_overrides() if each[1] not in updates or owner not in (None, each[0])]
    entries += [(owner, name, value) for name, value in updates.items()]
    with _override_context(tuple(sorted(entries, key=lambda each: (each[0] or 0, each[1])))):
        yield


def forward_autotune_only() -> contextlib.AbstractContextManager[None]:
    """Returns a block in which no backward pass is measured on a miss: `policy_override(validate_backward=False)`."""
    return policy_override(validate_backward=False)
