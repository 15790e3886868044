"""The policies that apply to the calls traced in a `with` block."""

import contextlib
from collections.abc import Generator
from typing import Any, final

import jax


@final
class BlockPolicy:
    """A policy that is on in its blocks and off elsewhere; part of the key of every jitted function.

    Each policy is created when its module is imported: creating one later makes JAX compile everything again, and is
    not thread-safe. It touches no device.
    """

    def __init__(self) -> None:
        self._context: Any = jax.make_user_context(False)

    @contextlib.contextmanager
    def block(self) -> Generator[None]:
        """Returns a block in which the policy is on."""
        with self._context(True):
            yield

    @property
    def is_on(self) -> bool:
        """Returns whether a block of the policy is active on this thread."""
        return self._context.value
