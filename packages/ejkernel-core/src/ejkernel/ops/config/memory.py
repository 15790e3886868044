"""The memory tier: configurations that were measured, here or earlier, and are in use in this process."""

import threading
from collections.abc import Hashable
from typing import Any

from ejkernel.ops.config.key import ConfigKey


class ConfigCache:
    """A thread-safe map from `ConfigKey` to a configuration part.

    `generation` grows whenever the configuration of a call changes that was already compiled. Eager calls are compiled
    once per generation, so that a call after tuning uses the measured configuration, and tuning a new call costs
    nothing to those that went before.

    Attributes:
        settled: Calls that need no further look before they run; forgotten with everything else.
    """

    def __init__(self) -> None:
        self._entries: dict[ConfigKey, Any] = {}
        self._answers: dict[ConfigKey, Any] = {}
        self._lock = threading.Lock()
        self._generation = 0
        self.settled: set[Hashable] = set()

    @property
    def generation(self) -> int:
        """Returns how often a configuration that was in use has changed; it is part of the jit cache key."""
        return self._generation

    def get(self, key: ConfigKey) -> Any | None:
        """Returns the part stored under `key`, or None."""
        return self._entries.get(key)

    def put(self, key: ConfigKey, part: Any) -> None:
        """Stores a part."""
        with self._lock:
            self._entries[key] = part
            if self._answers.pop(key, part) != part:
                self._generation += 1

    def note_selected_part(self, key: ConfigKey, part: Any) -> None:
        """Notes that a call is going to use `part`, wherever it came from."""
        with self._lock:
            self._answers[key] = part
            if self._entries.get(key, part) != part:  # another thread stored one in the meantime
                self._generation += 1

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()
            self._answers.clear()
            self.settled.clear()
            self._generation += 1

    def size(self) -> int:
        """Returns number of entries."""
        return len(self._entries)

    def keys(self) -> tuple[ConfigKey, ...]:
        """Returns the stored keys."""
        with self._lock:
            return tuple(self._entries)
