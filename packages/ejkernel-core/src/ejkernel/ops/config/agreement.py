"""Multi-process agreement: process 0 decides, and all other processes use its decision.

Processes of one job may have different stores on their disks, and a collective program compiled with different tile
sizes is a different program. A decision travels through the job's key-value service under the configuration's own key,
so it does not matter in which order processes ask. It holds until the processes tune the call anew, which, like every
call, they do together.
"""

import contextlib
import contextvars
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import msgspec

from ejkernel import _compat
from ejkernel.errors import AgreementError
from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.config.selection import Selection

TIMEOUT_VARIABLE = "EJKERNEL_AGREEMENT_TIMEOUT_S"

_chain_serial_numbers = itertools.count()
_explain_only_context: contextvars.ContextVar[bool] = contextvars.ContextVar("looking", default=False)


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    part: Any = None
    tier: str = ""
    error: str | None = None


@contextlib.contextmanager
def explain_only() -> Generator[None]:
    """Returns a context in which chains neither decide for other processes nor wait for them, so that a single process
    can explain a call.
    """
    token = _explain_only_context.set(True)
    try:
        yield
    finally:
        _explain_only_context.reset(token)


def is_explain_only() -> bool:
    """Returns whether an `explain_only` block is active."""
    return _explain_only_context.get()


def is_single_process() -> bool:
    """Returns whether the job has a single process."""
    return _compat.coordination_client() is None or jax.process_count() == 1


class Agreement:
    """The selections that the processes of a job agreed on for one chain.

    A chain is identified by the order in which chains are first asked, which is the same in every process.
    """

    def __init__(self) -> None:
        self._decided: dict[ConfigKey, Selection] = {}
        self._rounds: dict[ConfigKey, int] = {}
        self._serial: int | None = None
        self._lock = threading.RLock()

    def known_decision(self, key: ConfigKey) -> Selection | None:
        """Returns the decision for `key` if this process already knows one."""
        return self._decided.get(key)

    def decide(
        self, key: ConfigKey, part: type, choose_locally: Callable[[], Selection], restart_agreement: bool = False
    ) -> Selection:
        """Returns the selection that process 0 makes for `key`.

        Args:
            key: The call.
            part: Type of its configuration part.
            choose_locally: Makes the selection. Runs only in process 0, and only if there is no decision yet.
            restart_agreement: Ends the current decision. Every process must pass True in the same call.

        Raises:
            AgreementError: Process 0 has not asked for this key within `EJKERNEL_AGREEMENT_TIMEOUT_S` (600) seconds,
                or could not decide.
        """
        if is_single_process():
            return choose_locally()
        with self._lock:
            if restart_agreement:
                self._start_next_round(key)
            if key in self._decided:
                return self._decided[key]
            name = self._message_key(key)
            if jax.process_index() == 0:
                return self._decide_and_publish(name, key, choose_locally)
        selection = self._wait_for_decision(name, key, part)  # without the lock: other calls need not wait for this one
        self._decided[key] = selection
        return selection

    def _decide_and_publish(self, name: str, key: ConfigKey, propose: Callable[[], Selection]) -> Selection:
        try:
            selection = propose()
        except Exception as error:
            _publish_message(name, _Message(error=f"{type(error).__name__}: {error}"))
            self._start_next_round(key)
            raise
        _publish_message(name, _Message(selection.part, selection.tier))
        self._decided[key] = selection
        return selection

    def _wait_for_decision(self, name: str, key: ConfigKey, part: type) -> Selection:
        message = msgspec.json.decode(_wait_for_message(name, key), type=_Message)
        if message.error is not None:
            with self._lock:
                self._start_next_round(key)
            raise AgreementError(f"process 0 could not choose a configuration for {key}: {message.error}")
        sentence = f"agreement: process 0 decided, by its tier {message.tier}"
        return Selection(msgspec.convert(message.part, part), message.tier, (sentence,))

    def _start_next_round(self, key: ConfigKey) -> None:
        self._rounds[key] = self._rounds.get(key, 0) + 1
        self._decided.pop(key, None)

    def _message_key(self, key: ConfigKey) -> str:
        if self._serial is None:
            self._serial = next(_chain_serial_numbers)
        digest = hashlib.sha256(str(key).encode()).hexdigest()
        return f"ejkernel/config/{self._serial}/{digest}/{self._rounds.get(key, 0)}"


def _publish_message(name: str, message: _Message) -> None:
    client: Any = _compat.coordination_client()
    client.key_value_set(name, msgspec.json.encode(message).decode())


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE) or "600"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE}: got {text!r}, wants a positive number of seconds")
    return seconds


def _wait_for_message(name: str, key: ConfigKey) -> str:
    client: Any = _compat.coordination_client()
    timeout_s = _timeout_s()
    try:
        return client.blocking_key_value_get(name, int(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise AgreementError(
            f"process {jax.process_index()} waited {timeout_s:g} s for process 0 to choose a configuration for {key}; "
            "every process of a job must make the same calls"
        ) from error
